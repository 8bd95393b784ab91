"""Start pytest once more where it does not run in the environment of stages and sweeps.

Loaded with ``-p``, before anything else: some of that environment is read as a process starts, and
much of it as libraries are imported.
"""

from __future__ import annotations

import os
import sys

from hetero.errors import HeteroError
from pipelines import environment

try:
    _wanted = environment.processor()
except HeteroError as error:
    sys.exit(f"Error: {error}")
if any(os.environ.get(name) != value for name, value in _wanted.items()):
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | _wanted)
