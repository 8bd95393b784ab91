"""Output files that are written whole or not at all, and CSV files that may be no CSV."""

from __future__ import annotations

import csv
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from hetero.errors import DataError, ParameterError


@contextmanager
def writing(path: Path | str, *, force: bool = False) -> Iterator[Path]:
    """Give a path to write to, and move it to ``path`` when the block ends without an error.

    An existing file is left alone unless ``force``; an interrupted block leaves nothing behind.

    Raises
    ------
    ParameterError
        If ``path`` exists and ``force`` is not set, or its folder does not exist.

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
    # Same folder, so that the final move cannot cross file systems; same ending, because
    # writers choose the compression by it.
    part = target.with_name(f".{secrets.token_hex(4)}.{target.name}")
    try:
        yield part
        part.replace(target)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def check_new(path: Path | str, *, force: bool = False) -> None:
    """Refuse a file that :func:`writing` could not write, before the work that ends in it.

    Raises
    ------
    ParameterError
        If ``path`` exists and ``force`` is not set, or its folder does not exist.

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


@contextmanager
def csv_lines(path: Path) -> Iterator[TextIO]:
    """Open a CSV file; what is no text or no CSV ends in an error of one sentence.

    Raises
    ------
    DataError
        If the file cannot be opened, is not UTF-8, or holds what the csv module refuses.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise DataError(
            f"The file cannot be read ({error.strerror}).", path=path, resolve="check its name."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"The file is not UTF-8 text ({error.reason} at byte {error.start}).",
            path=path,
            resolve="save it as UTF-8.",
        ) from None
    except csv.Error as error:
        raise DataError(
            f"The file cannot be split into cells ({error}).",
            path=path,
            resolve="put cells that hold commas or quotes in quotes, and close them.",
        ) from None
