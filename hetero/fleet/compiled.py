"""The one way this project compiles a kernel."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

# Division as numpy does it, without an exception path, lets LLVM inline and vectorise. Kernels
# allocate nothing, so they need no reference counts; those cost three quarters of the run time,
# an atomic increment and decrement for every record that is looked at.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def _fingerprint() -> int:
    """One number for the text of all kernels."""
    found = 0
    for package in ("fleet", "routers", "simulator"):
        for path in sorted((Path(__file__).parents[1] / package).glob("*.py")):
            text = path.read_bytes()
            found = zlib.crc32(text, found) if b"@compiled" in text else found
    return found


_SOURCES = _fingerprint()


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
