"""Runs modules as ``python -m`` does, each in a fork of a process that has imported what they need.

A line of standard input says which: {module, arguments, root, environment, folder}; ``hetero`` is
the command. What is printed goes to files of the folder, at last the exit code. Points of a sweep
run in the fork itself. WARM_FIRST in the environment is code to begin with.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

from hetero import paths
from hetero.apps import cli
from pipelines import sections
from pipelines.sweep import workers
from tests.pipeline.conftest import SECTION

IMPORTED = ("matplotlib.pyplot", "papermill", "seaborn", "pipelines.bench.commands",
            "pipelines.commands", "pipelines.repro", "pipelines.status", "pipelines.studies.claims",
            "pipelines.sweep.command", "pipelines.sweep.run", "pipelines.sweep.shell")  # fmt: skip


def prepare(module: str, arguments: list[str], root: str, environment: dict[str, str]) -> None:
    """Be in a small project what this process is in its own checkout."""
    os.chdir(root)
    os.environ.update(environment)
    paths._PACKAGE = Path(root) / "hetero"
    exec(SECTION, vars(sections))
    workers._backend = lambda *_: nullcontext({"backend": "sequential"})
    exec(environment.get("WARM_FIRST", ""), {})
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)


def main() -> None:
    """One fork waits for another, which runs the module."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # so that forks share what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork has ended
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        call = json.loads(line)
        folder = Path(call.pop("folder"))
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            (folder / "code.part").write_text(f"{code}")
            (folder / "code.part").rename(folder / "code")
            os._exit(0)
        for number, name in enumerate(("in", "out", "err")):
            os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT), number)
        code = 1
        try:
            prepare(**call)
            if call["module"] == "hetero":
                cli.main()
            else:
                runpy.run_module(call["module"], run_name="__main__", alter_sys=True)
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
            os._exit(code)  # what the interpreter would tidy up takes longer than many a call


if __name__ == "__main__":
    main()
