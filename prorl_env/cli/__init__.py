"""The command line, ``prorl-env``. ``main`` is where errors become one sentence and an exit code."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run ``prorl-env``.

    Exit codes: 0 done; 1 something broke, or a check did not hold; 2 the call or the machine has to be changed first;
    130 interrupted.
    """
    from prorl_env.errors import ProrlError, SetupError, StateError, UsageError

    try:
        from prorl_env.cli.app import run

        code = run()
    except (UsageError, SetupError, StateError) as error:
        print(f"prorl-env: {error}", file=sys.stderr)
        code = 2
    except ProrlError as error:
        print(f"prorl-env: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("prorl-env: interrupted; everything that it started has been stopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # Whoever read our output has gone, e.g. `prorl-env … | head`.
        sys.stdout = None
        code = 1
    sys.exit(code)
