"""Workloads: traces of requests, real, drawn from a twin, or synthetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from hetero import paths
from hetero.errors import ParameterError, require
from hetero.workload import datasets, lengths, readers, statistics, synthetic
from hetero.workload.lengths import LengthRanges
from hetero.workload.trace import Trace
from hetero.workload.twin import Twin
from hetero.workload.twin_check import TwinCheck

__all__ = [
    "LengthRanges",
    "Trace",
    "TraceSource",
    "Twin",
    "TwinCheck",
    "attainable",
    "lengths",
    "load",
    "load_twin",
    "names",
    "open_trace",
    "readers",
    "source_of",
    "statistics",
    "synthetic",
]


TraceSource: TypeAlias = Literal["twin", "real"]
"""A trace drawn from its twin, or the real one read from the fetched file."""


def _helix_lengths(file: str) -> Callable[[str], Trace]:
    return lambda name: readers.read(datasets.path("helix_lengths", file), name=name)


# How the real trace of each name is read.
_REAL: dict[str, Callable[[str], Trace]] = {
    "azure2023_conv": lambda name: readers.read(datasets.path(name), name=name),
    "azure2023_code": lambda name: readers.read(datasets.path(name), name=name),
    "mooncake_conversation": lambda name: readers.read(datasets.path(name), name=name),
    "mooncake_synthetic": lambda name: readers.read(datasets.path(name), name=name),
    "sharegpt": _helix_lengths("shared_gpt.csv.gz"),
    "alpaca": _helix_lengths("alpaca.csv.gz"),
    "arxiv": lambda name: readers.read(
        datasets.path("vidur_arxiv"),
        columns="input=num_prefill_tokens,output=num_decode_tokens",
        name=name,
    ),
}
_DATASETS = {"sharegpt": "helix_lengths", "alpaca": "helix_lengths", "arxiv": "vidur_arxiv"}


def names(source: TraceSource = "real") -> tuple[str, ...]:
    """Names that :func:`load` knows; not every real trace has a twin.

    Examples
    --------
    >>> names("twin")[:3]
    ('azure2023_conv', 'azure2023_code', 'mooncake_conversation')
    """
    if source == "real":
        return tuple(_REAL)
    return tuple(name for name in _REAL if _twin_file(name).is_file())


def load(name: str, source: TraceSource = "twin", seed: int = 0) -> Trace:
    """Trace of a name, drawn from its committed twin or read from the fetched file.

    Parameters
    ----------
    name
        One of :func:`names`; sharegpt, alpaca and arxiv have lengths only, so that all their
        requests arrive at time 0.
    source
        ``"twin"`` needs no raw data; ``"real"`` needs them fetched or in a mirror.
    seed
        Seed of the twin; the real trace does not depend on it.

    Raises
    ------
    DownloadError
        If the real trace is not here.

    Examples
    --------
    >>> load("azure2023_conv").source
    'twin:azure2023_conv, seed 0'
    """
    if source == "twin":
        return load_twin(name).draw(seed)
    if source != "real":
        raise ParameterError(f"'{source}' is no source of traces.", resolve="use twin or real.")
    _check_name(name)
    found = _REAL[name](name)
    return replace(found, source=found.source.replace("file:", "real:", 1))


def attainable(name: str, source: TraceSource) -> TraceSource:
    """``source``, or ``"twin"`` where the real trace is not here and has no public address.

    A trace that only has to be fetched stays ``"real"``, so that loading it says what to do.

    Examples
    --------
    >>> attainable("azure2023_conv", "real"), attainable("sharegpt", "twin")
    ('real', 'twin')
    """
    _check_name(name)
    dataset = datasets.dataset(_DATASETS.get(name, name))
    return "twin" if not (dataset.public or datasets.available(dataset.name)) else source


def open_trace(
    file_or_name: str | Path,
    source: TraceSource = "twin",
    seed: int = 0,
    *,
    columns: str = "",
) -> Trace:
    """Trace of a name (see :func:`load`), or of a file (see :func:`readers.read`).

    Raises
    ------
    DataError, DownloadError
        If the file is bad, or the real trace is not here.
    """
    name = str(file_or_name)
    if name in _REAL:
        require(
            not columns,
            f"The columns and units of {name} are known.",
            resolve="leave out what names them.",
        )
        return load(name, source, seed)
    if not Path(name).exists():
        raise ParameterError(
            f"'{name}' is neither a file nor a known trace.",
            resolve=f"check the path, or use one of {', '.join(names())}.",
        )
    return readers.read(name, columns=columns)


def load_twin(name: str) -> Twin:
    """The committed twin of that name."""
    _check_name(name)
    file = _twin_file(name)
    if not file.is_file():
        raise ParameterError(
            f"{name} has no twin.",
            resolve=f"use its real trace, or one of {', '.join(names('twin'))}.",
        )
    return Twin.load(file)


def source_of(name: str) -> str:
    """Attribution of a real trace: what it is, its licence and whom to cite."""
    _check_name(name)
    return datasets.dataset(_DATASETS.get(name, name)).source


def _twin_file(name: str) -> Path:
    return paths.data("twins", f"{name}.json")


def _check_name(name: str) -> None:
    if name not in _REAL:
        file = f"open a file with workload.open_trace({name!r}), or " if Path(name).suffix else ""
        known = f"{file}use one of {', '.join(names())}."
        raise ParameterError(f"No trace is called '{name}'.", resolve=known)
