"""Start pytest once more where it does not run in the environment of stages and sweeps.

Signals that the caller ignores, as a shell does for what it starts in the background, are heeded
again: programs that tests start would inherit that, and interrupting them is what some tests are
about.

Loaded with ``-p``, before anything else: some of that environment is read as a process starts, and
much of it as libraries are imported.
"""

from __future__ import annotations

import os
import signal
import sys

from hetero.errors import HeteroError
from pipelines import environment

for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    _wanted = environment.processor()
except HeteroError as error:
    sys.exit(f"Error: {error}")
if any(os.environ.get(name) != value for name, value in _wanted.items()):
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | _wanted)
