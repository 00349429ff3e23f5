"""``python -m prorl_env.cli``."""

from prorl_env.cli import main

main()
