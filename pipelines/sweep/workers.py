"""Where the points of a sweep run: processes of this machine, or a Dask or Ray cluster.

joblib runs them all. A worker that dies takes one point with it, which is run again; only a point
whose workers die again and again is given up.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from joblib.externals.loky import get_reusable_executor

from hetero.errors import HeteroError, ParameterError
from hetero.progress import progress
from pipelines import environment, guard, process_lock
from pipelines.sweep import point
from pipelines.sweep.point import Job

_ROUNDS_WITHOUT_PROGRESS = 5
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class SweepError(HeteroError):
    """A sweep whose workers do not come back."""


def run_all(
    jobs: Sequence[Job], *, on: str = "loky", workers: int = 0, show: bool | None = None
) -> None:
    """Run the points that are not finished, until each is finished or has failed.

    What failed in an earlier call is tried again.

    Parameters
    ----------
    on
        ``"loky"``, ``"dask:ADDRESS"`` or ``"ray:ADDRESS"`` (``ray:auto`` finds a local one).
    workers
        Processes at once; 0 takes all cores, or all that the cluster has.
    show
        Whether to draw a progress bar; by default where stderr is a terminal.

    Raises
    ------
    SweepError
        If the folder cannot be written, or the workers die again and again without any point
        ending.
    """
    _make(jobs)
    pending = [job for job in jobs if not job.ended]
    if not pending:
        return
    idle, last = 0, ""
    with (
        _own(Path(pending[0].folder)) as own,
        guard.ended_with_process(),
        _backend(on, workers) as options,
        progress(len(jobs), "points", unit="points", show=show) as advance,
        _watching(pending, advance),
    ):
        advance(len(jobs) - len(pending))
        while pending:
            before = len(pending)
            # What ran when a worker died runs alone, so that a deadly point takes no other along.
            alone = [job for job in pending if job.running(own).is_file()]
            together = [job for job in pending if job not in alone]
            for batch in (*([job] for job in alone), together):
                last = _run(batch, own, options, 1 if workers == 1 else "all") or last
            pending = [job for job in pending if not job.ended]
            idle = 0 if len(pending) < before else idle + 1
            if idle >= _ROUNDS_WITHOUT_PROGRESS:
                raise SweepError(
                    f"No point ended in {idle} rounds; {len(pending)} are left ({last[:300]}).",
                    resolve="look for a lack of memory or disk, and run the same command again; "
                    "finished points are kept.",
                )


def _make(jobs: Sequence[Job]) -> None:
    """Make the folders, and forget what failed and what dead calls left half-written."""
    if not jobs:
        return
    running = Path(jobs[0].folder) / "running"
    try:
        for folder in (jobs[0].target.parent, jobs[0].failure.parent, running):
            folder.mkdir(parents=True, exist_ok=True)
        _remove_dead(running)
        for job in jobs:
            job.failure.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(error, jobs[0].folder) from None


def _unwritable(error: OSError, folder: Path | str) -> SweepError:
    return SweepError(
        f"The sweep cannot write to {folder} ({error.strerror or error}).",
        resolve="free space there or name another folder, and run the same command again; "
        "finished points are kept.",
    )


@contextmanager
def _own(folder: Path) -> Iterator[str]:
    """A folder for what is half-written, of this call alone.

    A call is alive as long as it holds the lock beside its folder, which the system drops with the
    process. So sweeps share a folder without a look at what is another's.
    """
    running = folder / "running"
    try:
        lock, file = _locked(running)
    except OSError as error:
        raise _unwritable(error, folder) from None
    own = lock.with_suffix("")
    try:
        try:
            own.mkdir()
        except OSError as error:
            raise _unwritable(error, folder) from None
        yield str(own)
    finally:
        _remove(own)
        lock.unlink(missing_ok=True)
        os.close(file)


def _locked(running: Path) -> tuple[Path, int]:
    while True:
        lock = running / f"{secrets.token_hex(8)}.lock"
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        # Another call may have removed it before it was held.
        if process_lock.taken(file) is not False and lock.exists():
            return lock, file
        os.close(file)


def _remove_dead(running: Path) -> None:
    for path in sorted(running.iterdir()):
        lock = path if path.suffix == ".lock" else path.with_suffix(".lock")
        try:
            file = os.open(lock, os.O_RDWR)
        except FileNotFoundError:
            _remove(path)
            continue
        try:
            if process_lock.taken(file):
                _remove(lock.with_suffix(""))
                lock.unlink(missing_ok=True)
        finally:
            os.close(file)


def _remove(folder: Path) -> None:
    # Renamed first: what a worker still writes there then fails, and it sees that all is gone.
    gone = folder.with_name(f".{folder.name.lstrip('.')}")
    with suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        gone.unlink(missing_ok=True)  # a note of an earlier version


def _run(batch: Sequence[Job], own: str, options: dict[str, Any], ahead: int | str) -> str:
    """Run points; what the engine says if one of its workers died, else nothing.

    ``ahead`` points are handed out before one has ended.
    """
    import joblib

    try:
        with joblib.parallel_config(**options):
            joblib.Parallel(batch_size=1, pre_dispatch=ahead)(
                joblib.delayed(point.run)(job, own) for job in batch
            )
    except (HeteroError, KeyboardInterrupt):
        raise
    except OSError as error:
        if error.errno in _UNWRITABLE:
            raise _unwritable(error, batch[0].folder) from None
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # each engine tells the death of a worker in its own way
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _backend(on: str, workers: int) -> Iterator[dict[str, Any]]:
    kind, _, address = on.partition(":")
    if on == "loky":
        # Workers that joblib kept from an earlier call were started in another environment.
        get_reusable_executor().shutdown(wait=True)
        # With one joblib would run points in the process that watches over them: of two, one waits.
        with environment.applied(environment.stage()):
            yield {"backend": "loky", "n_jobs": max(workers or os.cpu_count() or 1, 2)}
    elif kind == "dask" and address:
        yield from _dask(address, workers)
    elif kind == "ray" and address:
        yield from _ray(address, workers)
    else:
        raise ParameterError(
            f"'{on}' is no place to run a sweep.",
            resolve="use loky, dask:ADDRESS (as dask:tcp://host:8786) or ray:ADDRESS.",
        )


def _dask(address: str, workers: int) -> Iterator[dict[str, Any]]:
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise _missing("dask") from error
    try:
        connect: Any = Client
        client = connect(address, timeout="15s", set_as_default=True)
    except (OSError, TimeoutError, ValueError) as error:
        raise SweepError(
            f"No Dask scheduler answers at {address} ({error}).",
            resolve="start one with `dask scheduler`, and workers with `dask worker ADDRESS`.",
        ) from error
    with client:
        yield {"backend": "dask", "n_jobs": workers or -1}


def _ray(address: str, workers: int) -> Iterator[dict[str, Any]]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ModuleNotFoundError as error:
        raise _missing("ray") from error
    try:
        ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SweepError(
            f"No Ray cluster answers at {address} ({error}).",
            resolve="start one with `ray start --head`.",
        ) from error
    try:
        register: Any = register_ray
        register()
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        yield {"backend": "ray", "n_jobs": workers or int(resources.get("CPU", 1))}
    finally:
        ray.shutdown()


def _missing(extra: str) -> ParameterError:
    return ParameterError(
        f"This sweep is to run on {extra}, which is not installed.",
        resolve=f"install it with `pip install 'hetero[{extra}]'`, here and on every worker.",
    )


@contextmanager
def _watching(jobs: Sequence[Job], advance: Callable[[int], None]) -> Iterator[None]:
    """Report points as they end; their folders are what all engines have in common."""
    done, left = threading.Event(), list(jobs)

    def report() -> None:
        ended = [job for job in left if job.ended]
        if ended:
            advance(len(ended))
            left[:] = [job for job in left if job not in ended]

    def watch() -> None:
        while not done.wait(0.5):
            report()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        report()
