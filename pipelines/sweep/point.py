"""One point of a sweep, run in a worker: a folder that appears whole, or a note why it failed."""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import shutil
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import HeteroError
from hetero.files import move, writing
from pipelines import environment

RECORD = "point.json"
_ATTEMPTS = 3  # of a point whose worker dies: more would kill the workers one after the other

# A process runs one notebook at a time: the shell is one per process.
_ONE = threading.Lock()


class PointTimeout(Exception):
    """A point that ran past its limit."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker needs to run one point; folders are absolute paths that every worker sees.

    Attributes
    ----------
    folder
        Folder of the sweep; the point goes to ``points/KEY`` below it.
    values
        Parameters of the notebook, those of the runner included but for ``output``.
    record
        What ``point.json`` says of the point.
    """

    root: str
    folder: str
    key: str
    notebook: str
    values: dict[str, Any]
    record: dict[str, Any]
    limit_s: float

    @property
    def target(self) -> Path:
        """Where the finished point lies."""
        return Path(self.folder) / "points" / self.key

    @property
    def failure(self) -> Path:
        """Where it is said why the point failed."""
        return Path(self.folder) / "failed" / f"{self.key}.json"

    def running(self, own: str) -> Path:
        """Where its attempts are noted while it runs; it stays behind where a worker dies."""
        return Path(own) / f"{self.key}.json"

    @property
    def ended(self) -> bool:
        """Whether the point is finished or has failed."""
        return self.target.is_dir() or self.failure.is_file()


def run(job: Job, own: str) -> str:
    """Run a point unless it is there already; returns ``done``, ``failed`` or ``abandoned``.

    Parameters
    ----------
    own
        Folder of the call that the point belongs to, for what is half-written. Once it is gone
        nobody waits for the point, and nothing is said of its failure.
    """
    if job.target.is_dir():
        return "done"
    running = job.running(own)
    hung = running.with_suffix(".hung")
    if hung.is_file() and hung.stat().st_size:
        where = hung.read_text(encoding="utf-8", errors="replace")
        return _fail(job, own, f"It hung past its limit of {job.limit_s:g} s.", where)
    before = _attempts(running)
    if before >= _ATTEMPTS:
        return _fail(job, own, f"Its worker died {before} times.", "")
    work = Path(own) / f"{job.key}-{secrets.token_hex(4)}"
    try:
        running.write_text(f"{before + 1}\n", encoding="utf-8")
        work.mkdir()
        _prepare()
        with _ONE, _limit(job.limit_s, hung):
            _execute(job, work)
        (work / RECORD).write_text(json.dumps(job.record, indent=1, default=str) + "\n")
        try:
            move(work, job.target)
        except OSError:
            # Another sweep finished the same point meanwhile.
            if not job.target.is_dir():
                raise
    except Exception as error:
        if getattr(error, "ename", "") == "KeyboardInterrupt":
            raise KeyboardInterrupt from None  # no fault of the point
        return _fail(job, own, _said(error), "".join(traceback.format_exception(error)))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    job.failure.unlink(missing_ok=True)
    _forget(running)
    return "done"


def _prepare() -> None:
    """What the first point of a process waits for, outside its limit: imports."""
    # The environment first, which numpy, numba and matplotlib read as they are imported.
    # A worker of loky was started in it; of Dask or Ray, it takes on what is not read at the start.
    os.environ.update(environment.stage() | {"MPLBACKEND": "agg"})
    import matplotlib.pyplot
    import papermill

    from pipelines.sweep import shell

    del matplotlib, papermill, shell


def _execute(job: Job, work: Path) -> None:
    import papermill

    from pipelines.sweep.shell import NAME

    before = Path.cwd()
    os.chdir(job.root)
    try:
        papermill.execute_notebook(
            job.notebook.replace("{", "{{").replace("}", "}}"),
            str(work / "notebook.ipynb").replace("{", "{{").replace("}", "}}"),
            parameters=job.values | {"output": str(work)},
            engine_name=NAME,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            request_save_on_cell_execute=False,
        )
    finally:
        os.chdir(before)


def _said(error: Exception) -> str:
    from papermill.exceptions import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        return f"Cell [{error.exec_count}]: {error.ename}: {error.evalue}"
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    return str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"


def _fail(job: Job, own: str, why: str, text: str) -> str:
    if not Path(own).is_dir():
        return "abandoned"
    # A full disk must not hide the reason: what cannot be written is tried again by the next call.
    try:
        with writing(job.failure, force=True) as part:
            said = job.record | {"why": why, "traceback": text}
            part.write_text(json.dumps(said, indent=1, default=str) + "\n", encoding="utf-8")
    finally:
        _forget(job.running(own))
    if job.target.is_dir():  # another sweep finished it
        job.failure.unlink(missing_ok=True)
        return "done"
    return "failed"


def _forget(running: Path) -> None:
    running.unlink(missing_ok=True)
    running.with_suffix(".hung").unlink(missing_ok=True)


def _attempts(running: Path) -> int:
    try:
        return int(json.loads(running.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0


@contextmanager
def _limit(seconds: float, hung: Path) -> Iterator[None]:
    """Raise in a point that runs too long; end its process if it hangs outside Python.

    Before the process ends it writes where it hangs to ``hung``.
    """
    main = threading.current_thread() is threading.main_thread()

    def stop(*_: object) -> None:
        raise PointTimeout(f"It ran past its limit of {seconds:g} s")

    hard = 1.5 * seconds + 5.0 if main else seconds
    with hung.open("w") as where:
        faulthandler.dump_traceback_later(hard, exit=True, file=where)
        before = signal.signal(signal.SIGALRM, stop) if main else None
        if main:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            if main:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()
