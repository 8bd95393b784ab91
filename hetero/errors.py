"""Every error a user can cause, each ending in one sentence that says what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

_LONGEST = 1500  # characters of a sentence


class HeteroError(Exception):
    """An error that names what was received, where, and how to mend it.

    The text reads ``<what> Resolve: <how>``; the command line prints it and exits non-zero.

    Examples
    --------
    >>> raise HeteroError("No GPU is called 'H1000'.", resolve="use one of hetero.gpus().")
    Traceback (most recent call last):
    hetero.errors.HeteroError: No GPU is called 'H1000'. Resolve: use one of hetero.gpus().
    """

    def __init__(self, what: str, *, resolve: str) -> None:
        # What was received may be a whole file in one cell.
        self.what = _shortened(what)
        self.resolve = _shortened(resolve)
        super().__init__(f"{self.what} Resolve: {self.resolve}")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments would otherwise be lost on the way back from a worker process.
        return _rebuild, (type(self), self.what, self.resolve, self.__dict__.copy())


def _rebuild(
    kind: type[HeteroError], what: str, resolve: str, state: dict[str, object]
) -> HeteroError:
    error = kind.__new__(kind)
    Exception.__init__(error, f"{what} Resolve: {resolve}")
    error.__dict__.update(state)
    return error


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} [...] {text[-half:]}"


class CatalogError(HeteroError):
    """A GPU, model, link or cluster that is unknown or described inconsistently."""


class ParameterError(HeteroError):
    """A parameter that is unknown, missing, of the wrong type or out of range."""


def require(
    good: bool, received: str, *, resolve: str, error: type[HeteroError] = ParameterError
) -> None:
    """Raise the error, a :class:`ParameterError`, with what was received unless it is good."""
    if not good:
        raise error(received, resolve=resolve)


def require_positive(**values: float) -> None:
    """Raise :class:`ParameterError` unless every value is finite and above 0.

    Examples
    --------
    >>> require_positive(rate_rps=0.0)
    Traceback (most recent call last):
    hetero.errors.ParameterError: rate_rps is 0. Resolve: give a finite number above 0.
    """
    for name, value in values.items():
        good = 0 < value < math.inf
        require(good, f"{name} is {value:g}.", resolve="give a finite number above 0.")


def require_not_negative(**values: float) -> None:
    """Raise :class:`ParameterError` unless every value is finite and at least 0."""
    for name, value in values.items():
        good = 0 <= value < math.inf
        require(good, f"{name} is {value:g}.", resolve="give a finite number of 0 or more.")


def require_share(**values: float) -> None:
    """Raise :class:`ParameterError` unless every value is above 0 and at most 1."""
    for name, value in values.items():
        require(0 < value <= 1, f"{name} is {value:g}.", resolve="give a share above 0, up to 1.")


class FitError(HeteroError):
    """Measurements that cannot determine what was asked of them."""


class InfeasibleError(HeteroError):
    """A plan that does not exist; the text names the constraint that binds."""


class ExportError(HeteroError):
    """A plan that the tool it is written for cannot express; the text names what it lacks."""


class SolverError(HeteroError):
    """A solver that ended without a solution, though one may exist; the text says at what."""


class DownloadError(HeteroError):
    """A file that could not be fetched or whose checksum is not the published one."""


class EndpointError(HeteroError):
    """A server that is not there, refuses, or answers in a way that cannot be used.

    Attributes
    ----------
    status
        HTTP status of a refusal, None where there was none.
    """

    status: int | None = None


class DataError(HeteroError):
    """A file whose content is not what its reader expects.

    Parameters
    ----------
    what
        One sentence about the content.
    path
        The file; ``line`` (1-based) and ``column`` are added to the text where known.

    Attributes
    ----------
    bad
        Mask of all rows that are so, where they are wrong one by one.
    """

    bad: Any = None

    def __init__(
        self,
        what: str,
        *,
        path: Path | str,
        line: int | None = None,
        column: str | None = None,
        resolve: str,
    ) -> None:
        self.path = Path(path)
        self.line = line
        self.column = column
        where = str(path)
        if line is not None:
            where += f", line {line}"
        if column is not None:
            where += f", column '{column}'"
        super().__init__(f"{where}: {what}", resolve=resolve)
