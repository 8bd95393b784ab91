"""``python -m hetero``, the same as ``hetero``."""

from hetero.apps.cli import main

main()
