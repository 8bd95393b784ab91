"""Runs modules as ``python -m`` does, each in a fork of a process that has imported what they need.

A line of standard input says which: {module, arguments, root, environment, folder}; ``hetero`` is
the command. What is printed goes to files of the folder, at last the exit code. Points of a sweep
run in the fork itself. WARM_FIRST in the environment is code to begin with.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import papermill  # noqa: F401
import seaborn  # noqa: F401

from hetero import paths
from hetero.apps import cli
from pipelines import commands, repro, sections, status  # noqa: F401
from pipelines.studies import claims  # noqa: F401
from pipelines.sweep import run, shell, workers  # noqa: F401
from tests.pipelines.conftest import SECTION


def called(module: str, arguments: list[str], root: str, environment: dict[str, str]) -> None:
    """Be in a small project what this process is in its own checkout, and run the module."""
    os.chdir(root)
    os.environ.update(environment)
    paths._PACKAGE = Path(root) / "hetero"
    exec(SECTION, vars(sections))
    workers._backend = lambda *_: contextlib.nullcontext({"backend": "sequential"})
    exec(environment.get("WARM_FIRST", ""), {})
    sys.argv = [module, *arguments]
    if module == "hetero":
        cli.main()
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork(call: dict, folder: Path) -> None:
    """One fork waits for another, which ends without what an interpreter tidies up."""
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / "code.part").write_text(f"{code}")
        (folder / "code.part").rename(folder / "code")
        os._exit(0)
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT), number)
    code = 1
    try:
        called(**call)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    gc.freeze()  # so that forks share what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork has ended
    for line in sys.stdin:
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            given = json.loads(line)
            fork(given, Path(given.pop("folder")))
