"""YAML files of names, numbers and lists: no aliases, no tags, no size that could stop a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hetero.errors import DataError

LIMIT_CHARACTERS = 200_000
"""Longest text that is read; a file of settings has a few thousand characters."""

_DEEPEST = 100  # brackets within brackets: the parser takes their number squared


def parse(text: str, path: Path) -> Any:
    """Content of a YAML text; ``path`` only names it in errors.

    Raises
    ------
    DataError
        If the text is too long, is no YAML, or has an alias.

    Examples
    --------
    >>> parse("sizes: [1, 2.5]", Path("sizes.yaml"))
    {'sizes': [1, 2.5]}
    """
    if len(text) > LIMIT_CHARACTERS:
        raise DataError(
            f"The file holds {len(text):,} characters; {LIMIT_CHARACTERS:,} are allowed.",
            path=path,
            resolve="keep settings only in it, and data in files of their own.",
        )
    if _depth(text) > _DEEPEST:
        raise _too_deep(path)
    yaml = YAML(typ="safe", pure=True)
    try:
        # An alias can stand for itself many times over: a few lines would fill the memory.
        if any(getattr(event, "anchor", None) is not None for event in yaml.parse(text)):
            raise DataError(
                "YAML aliases (`&name`, `*name`) are not allowed.",
                path=path,
                resolve="write each value out.",
            )
        return yaml.load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise DataError(
            f"Not valid YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}.",
            path=path,
            line=mark.line + 1 if mark else None,
            resolve="mend that line: indentation, brackets and quotes.",
        ) from error
    except RecursionError:
        raise _too_deep(path) from None
    # What Python says of a value goes through the parser: a date that does not exist, a number of
    # thousands of digits, a tag on a value of another kind.
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, IndexError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"A value cannot be read ({reason}).",
            path=path,
            resolve="write plain numbers, text in quotes, and no tags (`!!name`).",
        ) from None


def _depth(text: str) -> int:
    """Most brackets open at once, those within quotes included."""
    steps = np.zeros(len(text) + 1, dtype=np.int64)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    steps[1:] = np.isin(codes, [91, 123]).astype(np.int64) - np.isin(codes, [93, 125])
    total = np.cumsum(steps)
    return int((total - np.minimum.accumulate(total)).max())


def _too_deep(path: Path) -> DataError:
    return DataError(
        "Lists and sections are nested too deep.", path=path, resolve="close the brackets."
    )
