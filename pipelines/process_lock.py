"""Locks that the system drops with the process that holds them, and that say who it is."""

from __future__ import annotations

import errno
import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from hetero.errors import HeteroError

# Where there is no such module, as on Windows, nothing is locked.
fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_WAIT_S = 120.0  # for the children of a killed holder, which keep its lock


@contextmanager
def held(path: Path, what: str) -> Iterator[int]:
    """Hold a lock file for the block; gives its descriptor, which children may keep.

    Parameters
    ----------
    what
        The command that holds it, for the message to another who wants it.

    Raises
    ------
    HeteroError
        If a living process holds it. After a holder that was killed, its children are waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = time.monotonic() + _WAIT_S
        while taken(file) is False:
            number, _, since = path.read_text(encoding="utf-8").strip().partition(" ")
            holder = int(number) if number.isdecimal() else 0
            if time.monotonic() > end or (holder and psutil.pid_exists(holder)):
                who = f" (pid {holder}, since {since})" if holder else ""
                raise HeteroError(
                    f"Another `{what}` runs in {path.parents[2]}{who}.",
                    resolve="wait until it ends, or stop it, then run this again.",
                )
            time.sleep(0.2)
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()} {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
        yield file
    finally:
        os.close(file)


def taken(file: int) -> bool | None:
    """Whether the lock of an open file could be had; ``None`` where disk or system has none."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True
