"""Measured step times of one replica, from a published source or from a user's CSV file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import FitError, ParameterError
from hetero.latency.accuracy import Accuracy
from hetero.latency.step import StepModel

if TYPE_CHECKING:
    from hetero.rows import Rows

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

        def span(name: str, factor: float = 1.0, form: str = "g") -> Callable[[Any], str]:
            def told(item: tuple[Phase, Measurements]) -> str:
                values = getattr(item[1], name)
                return f"{factor * values.min():{form}} to {factor * values.max():{form}}"

            return told

        columns = (
            Column("phase", of=lambda item: item[0]),
            Column("rows", of=lambda item: len(item[1].batch)),
            Column("batch", "requests", of=span("batch")),
            Column("length", "tokens per request", of=span("length_tokens")),
            Column("time", "ms", of=span("seconds", 1e3, ".4g")),
        )
        parts = [(phase, part) for phase in PHASES if len((part := self.phase(phase)).batch)]
        covers = "" if self.layers is None else f", {self.layers} layer(s)"
        source = f"{self.provenance}: {self.source}{covers}"
        return Table.of(self.label or "Measurements", columns, parts, self.engine, source)


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
    from hetero.rows import read_rows

    rows = read_rows(path)
    rows = rows.where(~(rows.frame == "").all(axis=1).to_numpy())
    if not len(rows):
        raise rows.error("has no rows.", None, None, "give at least one measured step.")
    if "kept_for" in rows.frame or kept_for == "check":
        kept = rows.frame.kept_for.str.strip() if "kept_for" in rows.frame else rows.frame.index
        rows = rows.where(np.asarray((kept == "check") == (kept_for == "check")))
        if not len(rows):
            what = f"has no rows kept for a {kept_for}."
            rule = "measure some with hetero profile, or give another file."
            raise rows.error(what, None, None, rule)
    names = {name: own.get(name, name) for name in COLUMNS}
    in_ms = names["ms"] in rows.frame and names["seconds"] not in rows.frame
    for name in (*own, "phase", "batch", "ms" if in_ms else "seconds"):
        _require_column(rows, name, names[name])

    def numbers(
        name: str, needed: NDArray[np.bool_], above: float = -np.inf, least: float = -np.inf
    ) -> Floats:
        if needed.any():
            _require_column(rows, name, names[name])
        return rows.numbers(names[name], needed=needed, above=above, least=least)

    phases = rows.frame[names["phase"]].str.strip().str.lower()
    strange = ~np.asarray(phases.isin(PHASES))
    rows.refuse(strange, names["phase"], "a phase", "write prefill or decode.")
    every, decode = np.ones(len(rows), dtype=bool), np.asarray(phases == "decode")
    batch = numbers("batch", every, least=1)
    per_step = decode & rows.filled(names["context_tokens"])
    total = decode & ~per_step
    if both := np.flatnonzero(per_step & rows.filled(names["output_tokens"])).tolist():
        raise rows.error(
            "a decode row has both context_tokens and output_tokens, so it is not clear whether "
            "its time is one step or the sum over the outputs.",
            both[0],
            names["output_tokens"],
            "leave one of the two empty.",
        )
    inputs = numbers("input_tokens", ~per_step, least=1)
    context = numbers("context_tokens", per_step, least=0)
    outputs = numbers("output_tokens", total, least=1)
    seconds = numbers("ms" if in_ms else "seconds", every, above=0)
    seconds = seconds / 1e3 if in_ms else seconds
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


def _require_column(rows: Rows, name: str, column: str) -> None:
    from hetero.rows import listed

    if column not in rows.frame:
        what = f"has no column '{column}' for {name}; it has {listed(map(str, rows.frame))}."
        raise rows.error(what, None, None, f"name the column with --column {name}=YOUR_HEADING.")
