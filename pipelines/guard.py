"""Children that end with their parent, however it ends.

A stage is the fourth process in a row (``hetero repro``, DVC, a shell, the runner, the kernel), in
sessions of their own in between, so neither a signal to the group nor one from the kernel to the
direct child reaches all of them. A watcher in a session of its own therefore holds one end of a
pipe; when the other end closes, which the death of its owner does too, it ends every process that
inherited a mark in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_LONGEST_S = 60.0  # that processes are killed for; what outlives it is stuck in a device
_ENDED = (psutil.NoSuchProcess, psutil.AccessDenied, OSError)


@dataclass(frozen=True, slots=True)
class _Watcher:
    mark: str
    process: subprocess.Popen[bytes]


_lasting: _Watcher | None = None


@contextmanager
def ended_with_block(*, patience_s: float, keep: Sequence[int] = ()) -> Iterator[None]:
    """End all processes started in the block with it, or with this process if that is killed.

    Parameters
    ----------
    patience_s
        How long they may take to end by themselves before they are interrupted; four times as long
        after that, they are killed [s].
    keep
        File descriptors that stay open until the last of them is gone.

    Examples
    --------
    >>> with ended_with_block(patience_s=0):
    ...     child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    >>> child.wait()
    -9
    """
    watcher = _watcher(patience_s, keep)
    try:
        with _marking(watcher.mark):
            yield
    finally:
        assert watcher.process.stdin is not None
        watcher.process.stdin.close()
        watcher.process.wait()


@contextmanager
def ended_with_process() -> Iterator[None]:
    """Kill what is started in the block when this process ends, at the latest.

    Unlike with :func:`ended_with_block`, workers stay warm for the next block.
    """
    global _lasting
    if _lasting is None or _lasting.process.poll() is not None:
        _lasting = _watcher(0.0, ())
    with _marking(_lasting.mark):
        yield


def _watcher(patience_s: float, keep: Sequence[int]) -> _Watcher:
    mark = f"ENDS_WITH_{uuid.uuid4().hex}"
    root = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.guard", mark, str(patience_s)],
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{before}" if before else root},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=tuple(keep),
        start_new_session=True,
    )
    return _Watcher(mark, process)


@contextmanager
def _marking(mark: str) -> Iterator[None]:
    os.environ[mark] = "1"
    try:
        yield
    finally:
        os.environ.pop(mark, None)


def stop(mark: str, *, patience_s: float) -> None:
    """End every process whose environment holds ``mark``, and their children."""
    if _gone(mark, patience_s):
        return
    if patience_s:
        _send(mark, signal.SIGINT)
        if _gone(mark, 4.0 * patience_s):
            return
    end = time.monotonic() + _LONGEST_S
    # Again and again: a process may have started another since they were listed.
    while time.monotonic() < end and _send(mark, signal.SIGKILL):
        time.sleep(0.05)


def _gone(mark: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while found := _marked(mark):
        if time.monotonic() >= end:
            break
        time.sleep(0.05)
    return not found


def _send(mark: str, number: signal.Signals) -> int:
    found = _marked(mark)
    for process in found:
        with suppress(*_ENDED):
            process.send_signal(number)
    return len(found)


def _marked(mark: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        # Its children too: where the system guards a program, its environment cannot be read.
        with suppress(*_ENDED):
            if process.pid != os.getpid() and mark in process.environ():
                found |= {process, *process.children(recursive=True)}
    return {one for one in found if _lives(one)}


def _lives(process: psutil.Process) -> bool:
    with suppress(*_ENDED):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def main(arguments: list[str]) -> None:
    """Wait for the end of the owner, then end what it started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark, patience_s = arguments
    sys.stdin.buffer.read()
    stop(mark, patience_s=float(patience_s))


if __name__ == "__main__":
    main(sys.argv[1:])
