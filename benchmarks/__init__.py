"""Benchmarks, each a module with ``run() -> Iterator[Measurement]``; ``prorl-env bench NAME`` runs one."""

if __name__ != "prorl_env.benchmarks":
    raise ImportError("import prorl_env.benchmarks, not benchmarks")
