"""Measured step times of one replica, from a published source or from a user's CSV file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.display import Column, Shown, Table
from hetero.errors import DataError, FitError, ParameterError
from hetero.latency.accuracy import Accuracy
from hetero.latency.step import StepModel

Floats = NDArray[np.float64]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Measurements(Shown):
    """Times of prefills and decode steps of one replica under one engine.

    Attributes
    ----------
    decode
        Shape (N,), bool; False for a prefill of the whole batch.
    batch
        Shape (N,); requests in the step.
    length_tokens
        Shape (N,); per request, input tokens of a prefill or cached tokens read by a decode step.
    seconds
        Shape (N,); time of the step [s], > 0.
    gpu, llm
        Names in the catalog, empty if unknown.
    tensor_parallel
        GPUs that share the step.
    layers
        Layers that the time covers, None for the whole model with its head.
    engine
        Engine and its version: the generation that a fit must not mix.
    source, provenance
        Where the rows come from; ``measured`` or ``derived``.
    resolution_s
        Unit of the last printed digit, 0 where times are not rounded; scalar or shape (N,).
    """

    decode: NDArray[np.bool_]
    batch: Floats
    length_tokens: Floats
    seconds: Floats
    gpu: str = ""
    llm: str = ""
    tensor_parallel: int = 1
    layers: int | None = None
    engine: str = ""
    source: str = ""
    provenance: str = "measured"
    resolution_s: Floats | float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", np.asarray(self.decode, dtype=bool))
        for name in ("batch", "length_tokens", "seconds"):
            array = np.array(getattr(self, name), dtype=np.float64)
            if array.shape != self.decode.shape or not bool(np.all(np.isfinite(array))):
                raise ParameterError(
                    f"{self.label}: {name} has shape {array.shape} where {self.decode.shape} "
                    "finite numbers are due.",
                    resolve="give one finite number per row.",
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not bool(np.all((self.seconds > 0) & (self.batch > 0) & (self.length_tokens >= 0))):
            raise ParameterError(
                f"{self.label}: times and batch sizes must be positive, lengths not negative.",
                resolve="drop the rows that are not.",
            )

    @property
    def label(self) -> str:
        """What was measured, in a few words."""
        degree = f" x{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return " ".join(filter(None, (self.llm, "on" if self.gpu else "", self.gpu + degree)))

    @property
    def step_arguments(self) -> tuple[Floats, Floats, Floats, Floats]:
        """New tokens, decoding requests, cached tokens and pairs, for ``StepModel.seconds``."""
        b, length, decode = self.batch, self.length_tokens, self.decode
        return (
            np.where(decode, b, b * length),
            np.where(decode, b, 0.0),
            np.where(decode, b * length, 0.0),
            np.where(decode, 0.0, b * length**2 / 2.0),
        )

    def where(self, keep: NDArray[np.bool_]) -> Measurements:
        """The rows for which ``keep`` is True."""
        resolution = self.resolution_s
        return replace(
            self,
            decode=self.decode[keep],
            batch=self.batch[keep],
            length_tokens=self.length_tokens[keep],
            seconds=self.seconds[keep],
            resolution_s=resolution[keep] if isinstance(resolution, np.ndarray) else resolution,
        )

    def phase(self, phase: Phase) -> Measurements:
        """The rows of one phase."""
        return self.where(self.decode if phase == "decode" else ~self.decode)

    def accuracy(self, model: StepModel) -> dict[Phase, Accuracy]:
        """Accuracy of a step model on these rows, per phase that has rows."""
        predicted = model.seconds(*self.step_arguments)
        return {
            phase: Accuracy.of(predicted[rows], self.seconds[rows])
            for phase in PHASES
            if (rows := self.decode == (phase == "decode")).any()
        }

    def table(self) -> Table:
        """What the rows cover, one line per phase."""
        rows = []
        for phase in PHASES:
            part = self.phase(phase)
            if len(part.batch):
                rows.append(
                    (
                        phase,
                        len(part.batch),
                        f"{part.batch.min():g} to {part.batch.max():g}",
                        f"{part.length_tokens.min():g} to {part.length_tokens.max():g}",
                        f"{1e3 * part.seconds.min():.4g} to {1e3 * part.seconds.max():.4g}",
                    )
                )
        columns = (
            Column("phase"),
            Column("rows"),
            Column("batch", "requests"),
            Column("length", "tokens per request"),
            Column("time", "ms"),
        )
        covers = "" if self.layers is None else f", {self.layers} layer(s)"
        notes = tuple(filter(None, (self.engine, f"{self.provenance}: {self.source}{covers}")))
        return Table(self.label or "Measurements", columns, tuple(rows), notes)


def one_generation(tables: Iterable[Measurements]) -> str:
    """Engine generation that all tables share.

    Engines change as much from one generation to the next as GPUs do, so coefficients fitted
    across two of them describe neither.

    Raises
    ------
    FitError
        If there is more than one engine among the tables, or none.
    """
    engines = sorted({table.engine for table in tables})
    if len(engines) != 1:
        raise FitError(
            f"The tables come from {len(engines)} engine generations "
            f"({', '.join(engines) or 'no table at all'}).",
            resolve="fit each generation on its own.",
        )
    return engines[0]


KeptFor = Literal["fit", "check"]
"""What a measured row is for."""

COLUMNS = ("phase", "batch", "input_tokens", "context_tokens", "output_tokens", "seconds", "ms")


def read_csv(
    path: Path | str,
    *,
    columns: Mapping[str, str] | None = None,
    source: str = "",
    kept_for: KeptFor = "fit",
) -> Measurements:
    r"""Measurements of a CSV file with one step or one request batch per row.

    Columns: ``phase`` (``prefill`` or ``decode``), ``batch`` [requests], ``input_tokens`` per
    request, and ``seconds`` or ``ms``. A decode row is one step at ``context_tokens`` cached per
    request, or, where it gives ``output_tokens`` instead, the sum of that many steps after
    ``input_tokens`` (Xiong et al. eq. 4); the sum is kept as its mean step at the mean length.

    Parameters
    ----------
    columns
        Own heading per column name above, such as ``{"batch": "bs"}``.
    kept_for
        Rows whose column ``kept_for``, where there is one, says ``check`` test a fit and are no
        part of one: ``"fit"`` leaves them out, ``"check"`` gives only them.

    Raises
    ------
    DataError
        If the file, a column or a cell is not as described; names line and column.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "steps.csv"
    >>> _ = file.write_text("phase,batch,input_tokens,output_tokens,ms\ndecode,4,100,9,90\n")
    >>> steps = read_csv(file)
    >>> float(steps.length_tokens[0]), round(float(steps.seconds[0]), 6)
    (105.0, 0.01)
    """
    path = Path(path)
    own = dict(columns or {})
    if unknown := sorted(set(own) - set(COLUMNS)):
        raise ParameterError(
            f"'{unknown[0]}' is no column that can be mapped.",
            resolve=f"map one of {', '.join(COLUMNS)}.",
        )
    frame = _read_text(path)
    if "kept_for" in frame.columns or kept_for == "check":
        check = frame.get("kept_for", pd.Series("", frame.index)).str.strip() == "check"
        frame = frame[check if kept_for == "check" else ~check]
        if frame.empty:
            raise DataError(
                f"has no rows kept for a {kept_for}.",
                path=path,
                resolve="measure some with hetero profile, or give another file.",
            )
    cells = _Cells(path, frame, {name: own.get(name, name) for name in COLUMNS}, frozenset(own))

    decode = cells.phases()
    batch = cells.numbers("batch", np.ones(len(frame), dtype=bool), least=1)
    per_step = decode & cells.filled("context_tokens")
    total = decode & ~per_step
    if both := np.flatnonzero(per_step & cells.filled("output_tokens")).tolist():
        raise cells.error(
            both[0],
            "output_tokens",
            "a decode row has both context_tokens and output_tokens, so it is not clear whether "
            "its time is one step or the sum over the outputs.",
            "leave one of the two empty.",
        )
    inputs = cells.numbers("input_tokens", ~per_step, least=1)
    context = cells.numbers("context_tokens", per_step, least=0)
    outputs = cells.numbers("output_tokens", total, least=1)
    in_seconds = cells.present("seconds")
    seconds = cells.numbers("seconds" if in_seconds else "ms", np.ones(len(frame), dtype=bool))
    seconds = seconds if in_seconds else seconds / 1e3
    return Measurements(
        decode=decode,
        batch=batch,
        length_tokens=np.where(
            decode, np.where(total, inputs + (outputs + 1.0) / 2.0, context), inputs
        ),
        seconds=np.where(total, seconds / np.where(total, outputs, 1.0), seconds),
        engine="as measured",
        source=source or path.name,
    )


def _read_text(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(
            path, dtype=str, keep_default_na=False, skipinitialspace=True, skip_blank_lines=False
        )
    except FileNotFoundError:
        raise DataError(
            "there is no such file.", path=path, resolve="give the path of a CSV file."
        ) from None
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        text = (
            str(error).strip().splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        )
        raise DataError(
            f"cannot be read as CSV ({text}).",
            path=path,
            resolve="give a comma-separated file with one heading line.",
        ) from None
    if not isinstance(frame.index, pd.RangeIndex):
        # pandas takes what the first row has too much for names of rows, and shifts all columns.
        raise DataError(
            "the row has more cells than the heading.",
            path=path,
            line=2,
            resolve="give every row as many cells as the heading has.",
        )
    frame.columns = [str(name).strip() for name in frame.columns]
    empty = (frame == "").all(axis=1)
    frame = frame[~empty]
    if frame.empty:
        raise DataError("has no rows.", path=path, resolve="give at least one measured step.")
    return frame


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells of a text frame, read with errors that name line and column."""

    path: Path
    frame: pd.DataFrame
    heading: dict[str, str]
    mapped: frozenset[str]

    def present(self, name: str) -> bool:
        if name in self.mapped and self.heading[name] not in self.frame.columns:
            raise self._missing(name)
        return self.heading[name] in self.frame.columns

    def _missing(self, name: str) -> DataError:
        return DataError(
            f"has no column '{self.heading[name]}' for {name}; it has "
            f"{textwrap.shorten(', '.join(map(repr, self.frame.columns)), 400)}.",
            path=self.path,
            resolve=f"name the column with --column {name}=YOUR_HEADING.",
        )

    def error(self, row: int, name: str, what: str, resolve: str) -> DataError:
        line = int(self.frame.index[row]) + 2  # the heading is line 1
        return DataError(
            what, path=self.path, line=line, column=self.heading[name], resolve=resolve
        )

    def _text(self, name: str) -> pd.Series[str]:
        if not self.present(name):
            if name == "ms":
                name = "seconds"
            raise self._missing(name)
        return self.frame[self.heading[name]].str.strip()

    def filled(self, name: str) -> NDArray[np.bool_]:
        if not self.present(name):
            return np.zeros(len(self.frame), dtype=bool)
        return np.asarray(self._text(name) != "")

    def phases(self) -> NDArray[np.bool_]:
        text = self._text("phase").str.lower()
        known = np.asarray(text.isin(PHASES))
        if not known.all():
            row = int(np.flatnonzero(~known)[0])
            raise self.error(
                row, "phase", f"'{text.iloc[row]}' is no phase.", "write prefill or decode."
            )
        return np.asarray(text == "decode")

    def numbers(self, name: str, needed: NDArray[np.bool_], least: float | None = None) -> Floats:
        """Numbers of a column where ``needed``, 0 elsewhere; > 0, or at least ``least``."""
        values = np.zeros(len(self.frame))
        if not needed.any():
            return values
        text = self._text(name)
        numbers = pd.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64)
        good = np.isfinite(numbers) & ((numbers > 0) if least is None else (numbers >= least))
        if bad := np.flatnonzero(needed & ~good).tolist():
            bound = "> 0" if least is None else f">= {least:g}"
            cell = text.iloc[bad[0]]
            raise self.error(
                bad[0],
                name,
                f"{repr(cell) if cell else 'an empty cell'} is not a number {bound}.",
                f"write a number {bound} in plain digits, or drop the row.",
            )
        values[needed] = numbers[needed]
        return values
