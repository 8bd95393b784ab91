"""Output files that are written whole or not at all, and settings that are read with limits."""

from __future__ import annotations

import errno
import glob
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hetero.errors import DataError, ParameterError

_ABANDONED_S = 86_400.0  # no writer is silent for a day
_LONGEST = 16 << 20  # bytes of settings, or of a model of an engine's steps; devices have no end


def text(path: Path | str) -> str:
    """The text of a file that people write, or that is as small.

    Raises
    ------
    OSError
        If it is missing, is no file, or is too large.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a device or a pipe may be read for ever
        raise OSError(errno.EINVAL, "it is no regular file")
    if path.stat().st_size > _LONGEST:
        raise OSError(errno.EFBIG, f"it is larger than {_LONGEST >> 20} MiB")
    return path.read_text(encoding="utf-8")


@contextmanager
def writing(path: Path | str, *, force: bool = False) -> Iterator[Path]:
    """Give a path to write to, and move it to ``path`` when the block ends without an error.

    An existing file is left alone unless ``force``, and lends its rights to the new one. After an
    error or an interrupt nothing is left behind; what ``kill -9`` left is removed when the same
    file is written a day later or after that. The move survives a loss of power.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with writing(target) as part:
    ...     _ = part.write_text("whole")
    >>> target.read_text()
    'whole'
    """
    target = Path(path)
    check_new(target, force=force)
    if target.is_symlink():
        target = target.resolve()
    part = _part(target)
    _remove_left(target)
    try:
        yield part
        if target.exists():
            shutil.copymode(target, part)
        move(part, target)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def _part(target: Path) -> Path:
    """Same folder, so that no move crosses file systems; same ending, which writers go by."""
    return target.with_name(f".{secrets.token_hex(4)}.{target.name}")


def _remove_left(target: Path) -> None:
    """Remove parts of ``target`` that nobody has written to for a day."""
    for part in target.parent.glob(f".{'[0-9a-f]' * 8}.{glob.escape(target.name)}"):
        with suppress(OSError):  # another writer of the file may remove it too
            if part.is_file() and time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


def move(source: Path, target: Path) -> None:
    """Rename a file or folder such that a loss of power leaves the old one or the whole new one.

    Its bytes are on the disk before the rename, and the rename before this returns.

    Raises
    ------
    OSError
        If the bytes cannot be written (a full disk may say so only now), or ``target`` is a folder
        that holds files.
    """
    sync(source)
    source.replace(target)
    _sync(target.parent)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or of all files in a folder, are on the disk."""
    for one in (*path.rglob("*"), path):
        _sync(one)


def _sync(path: Path) -> None:
    folder = path.is_dir()
    if not folder and not path.is_file():
        return
    # Some systems open no folder, or write none: nothing can be done about it there.
    with suppress(OSError) if folder else nullcontext():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def check_new(path: Path | str, *, force: bool = False) -> None:
    """Refuse a file that :func:`writing` could not write, before the work that ends in it.

    Examples
    --------
    >>> check_new("no/such/folder/plan.json")
    Traceback (most recent call last):
    hetero.errors.ParameterError: The folder no/such/folder of plan.json does not exist. \
Resolve: create it first, or choose another folder.
    """
    target = Path(path)
    if target.exists() and not force:
        raise ParameterError(
            f"{target} exists already.",
            resolve="choose another name, or say --force (in Python force=True) to replace it.",
        )
    if not target.parent.is_dir():
        raise ParameterError(
            f"The folder {target.parent} of {target.name} does not exist.",
            resolve="create it first, or choose another folder.",
        )
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        part = _part(target)
        part.touch()
        part.unlink()
    except OSError as error:
        raise ParameterError(
            f"{target} cannot be written: {error.strerror}.",
            resolve="choose another name or folder.",
        ) from None


LIMIT_CHARACTERS = 200_000
"""Longest text that is read; a file of settings has a few thousand characters."""

_DEEPEST = 100  # brackets within brackets: the parser takes their number squared


def parse_yaml(text: str, path: Path) -> Any:
    """Content of a YAML text without aliases and tags; ``path`` only names it in errors.

    Raises
    ------
    DataError
        If the text is too long, is no YAML, or has an alias.

    Examples
    --------
    >>> parse_yaml("sizes: [1, 2.5]", Path("sizes.yaml"))
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
    most = now = 0
    for mark in re.findall(r"[\[\]{}]", text):
        now = max(0, now + (1 if mark in "[{" else -1))
        most = max(most, now)
    return most


def _too_deep(path: Path) -> DataError:
    return DataError(
        "Lists and sections are nested too deep.", path=path, resolve="close the brackets."
    )
