"""Output files that are either written whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetero.errors import ParameterError


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
