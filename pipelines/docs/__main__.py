"""``python -m pipelines.docs`` builds the documentation."""

from __future__ import annotations

import sys

from hetero.errors import HeteroError
from pipelines.docs.build import main

if __name__ == "__main__":
    try:
        main()
    except HeteroError as error:
        sys.exit(f"Error: {error}")
