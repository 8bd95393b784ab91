"""The one way this project compiles a kernel."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event

# Division as numpy does it, without an exception path, lets LLVM inline and vectorise. Kernels
# allocate nothing, so they need no reference counts; those cost three quarters of the run time,
# an atomic increment and decrement for every record that is looked at.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def _fingerprint() -> int:
    """One number for the text of all kernels."""
    found = 0
    for package in ("fleet", "routers", "simulator", "planners/maxflow"):
        for path in sorted((Path(__file__).parents[1] / package).glob("*.py")):
            text = path.read_bytes()
            found = zlib.crc32(text, found) if b"@compiled" in text else found
    return found


_SOURCES = _fingerprint()


class _Notice(event.Listener):
    """Says once, to people only, why the first run takes its time."""

    said = False

    def on_start(self, found: Any) -> None:
        """A kernel that no cache has is about to be compiled."""
        module = str(found.data["dispatcher"].py_func.__module__)
        if not self.said and module.startswith("hetero.") and sys.stderr.isatty():
            self.said = True
            print("Compiling the simulator for this machine, once: about 20 s.", file=sys.stderr)

    def on_end(self, found: Any) -> None:
        """It has been compiled."""


event.register("numba:compile", _Notice())  # type: ignore[no-untyped-call]


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function on first use; later processes read it from the cache.

    The cache lies beside the module or, where that cannot be written, in the user's cache
    folder; where neither can, every process compiles anew. An entry is good while the text of
    all kernels is the same: numba alone would look at the file of the function only, and go on
    using old code of what the function calls.
    """
    try:
        kernel = njit(cache=True, **_OPTIONS)(function)
        file = kernel._cache._cache_file
        file._source_stamp = (_SOURCES, file._source_stamp)
    except (RuntimeError, AttributeError):  # no place for a cache, or another kind of it
        return njit(**_OPTIONS)(function)
    return kernel
