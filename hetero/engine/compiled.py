"""The one way this project compiles a kernel."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hetero

# Division as numpy does it, without an exception path, lets LLVM inline and vectorise. Kernels
# allocate nothing, so they need no reference counts; those cost three quarters of the run time,
# an atomic increment and decrement for every record that is looked at.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


# What a module imports from this project when it is loaded: kernels call functions and freeze
# constants from there. Imports inside functions are of no use to a kernel.
_IMPORTS = re.compile(rb"^from (hetero[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_ROOT = Path(hetero.__file__).parents[1]


@cache
def _text_and_imports(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Text of a module, and the files of this project that it imports."""
    text = path.read_bytes()
    found = []
    for module, names in _IMPORTS.findall(text):
        folder = _ROOT.joinpath(*module.decode().split("."))
        named = (folder / f"{name.decode()}.py" for name in re.findall(rb"\w+", names))
        found += [folder.with_suffix(".py"), folder / "__init__.py", *named]
    return text, tuple(one for one in found if one.is_file())


@cache
def _fingerprint(path: Path) -> int:
    """One number for the text of a module and of all that it imports, step by step."""
    seen: set[Path] = set()
    left = [path]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += _text_and_imports(one)[1]
    found = 0
    for one in sorted(seen):
        found = zlib.crc32(_text_and_imports(one)[0], found)
    return found


_plain = False


def interpret() -> None:
    """Leave kernels functions of Python, if none is loaded yet: slower, but ready at once."""
    global _plain
    _plain = _plain or "numba" not in sys.modules


def interpreted() -> bool:
    """Whether they are, and work on objects and lists instead of arrays."""
    return _plain


def inlined(function: Callable[..., Any]) -> Any:
    """A function of kernels that is worth no call of its own: passing the arrays costs more."""
    return function if _plain else _kernel(function, forceinline=True)


def _kernel(function: Callable[..., Any], **more: Any) -> Any:
    from hetero.engine.linked import Kernel  # numba takes half a second

    return Kernel(function, targetoptions={"nopython": True, **_OPTIONS, **more})


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function on first use; later processes read it from the cache.

    The cache lies beside the module or, where that cannot be written, in the user's cache
    folder; where neither can, every process compiles anew. An entry is good while the text of its
    module and of all that this imports is the same: numba alone would look at the file of the
    function only, and go on using old code of what the function calls.
    """
    if _plain:
        return function
    kernel = _kernel(function)
    try:
        kernel.enable_caching()
        file = kernel._cache._cache_file
        file._source_stamp = (_fingerprint(Path(function.__code__.co_filename)), file._source_stamp)
    except (RuntimeError, AttributeError, OSError):  # no place for a cache, or another kind of it
        return _kernel(function)
    return kernel
