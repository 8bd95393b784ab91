"""Layer profiles as a latency source: step models of whole replicas, with mixed steps of their own.

RTX 4090, RTX PRO 6000, RTX A6000 and RTX 3090 are not among the other measured sources. Every
profile reduces to a :class:`~hetero.latency.step.StepModel` with a
:class:`~hetero.latency.step.Mixed`; what lies in ``data/measured/profile_steps.csv`` are these
models, so that nothing has to be fetched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.latency.frames import derived_frame
from hetero.latency.sources.raggedness import skews
from hetero.latency.step import Mixed, Piece, StepModel

ENGINE = "vLLM 0.19.0"
MOST_CACHED_TOKENS = 200_000  # that the reductions are fitted to
KINDS = ("prefill", "decode", "mixed", "ragged")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProfiledStep(Shown):
    """Step model of a profiled replica.

    Attributes
    ----------
    model
        Steps of requests of equal context.
    skew
        Share of the difference between longest and mean context that a ragged batch pays; NaN
        where it was not measured.
    errors
        Mean and largest relative error [%] of the reduction per kind of step (``KINDS``), on the
        rows of the profile within the range of the fit; NaN where there are none.
    """

    gpu: str
    llm: str
    tensor_parallel: int
    engine: str
    model: StepModel
    skew: float
    errors: dict[str, tuple[float, float]]
    note: str = ""

    def ragged(self, longest_over_mean: Floats) -> StepModel:
        r"""Step model for batches whose contexts differ.

        .. math:: rate(b) = rate_{equal}(b) (1 + skew(b)\,(longest/mean(b) - 1))

        with the shares of :func:`~hetero.latency.sources.raggedness.skews` for decode and for mixed
        steps where the profiler published them by batch, else :attr:`skew`.

        Parameters
        ----------
        longest_over_mean
            Shape (B,): longest over mean context among 1, 2, ..., B decoding requests, see
            :func:`~hetero.latency.sources.raggedness.longest_over_mean`; beyond B the last value
            holds.
        """
        if np.isnan(self.skew):
            return self.model
        piece = self.model.pieces[0]
        ratio = np.asarray(longest_over_mean, dtype=np.float64)
        count = len(piece.per_cached_token_s)
        ratio = np.append(ratio, np.full(max(0, count - len(ratio)), ratio[-1]))[:count]
        sizes, key = np.arange(1, count + 1), (self.gpu, self.llm, self.tensor_parallel)
        share = skews(*key, sizes, default=self.skew)
        mixed = piece.mixed
        if mixed is not None:
            more = skews(*key, sizes, steps="mixed", default=self.skew) * (ratio - 1.0)
            mixed = replace(mixed, per_cached_token_s=mixed.per_cached_token_s * (1.0 + more))
        rates = piece.per_cached_token_s * (1.0 + share * (ratio - 1.0))
        ragged = replace(piece, per_cached_token_s=rates, mixed=mixed)
        return replace(self.model, pieces=(ragged,), source=f"{self.model.source}, ragged batches")

    def on_other_host(self, step: StepModel, engine: str = "vLLM 0.24.0") -> StepModel:
        """``step`` with the all-reduces of another measured host, two per layer.

        Parameters
        ----------
        step
            :attr:`model`, or what :meth:`ragged` made of it.
        """
        from hetero.catalog import llm

        model, piece = llm(self.llm), step.pieces[0]
        size_bytes = 2 * model.hidden * piece.knots_tokens
        times = [
            all_reduce_s(self.gpu, self.tensor_parallel, size_bytes, host)
            for host in (engine, self.engine)
        ]
        knots_s = piece.knots_s + 2 * model.layers * (times[0] - times[1])
        source = f"{step.source}, all-reduce of {engine}"
        return replace(step, pieces=(replace(piece, knots_s=knots_s),), source=source)

    def table(self) -> Table:
        """Error of the reduction per kind of step."""
        rows = tuple((kind, *self.errors[kind]) for kind in KINDS)
        columns = (Column("steps"), Column("mean error", "%", 3), Column("largest error", "%", 3))
        notes = (self.note,) if self.note else ()
        return Table(f"{self.model.source}: {self.model.provenance}", columns, rows, notes)


def profiled_steps() -> tuple[ProfiledStep, ...]:
    """Every profiled replica."""
    rows = derived_frame("profile_steps").to_dict("records")
    return tuple(_of_row({str(name): value for name, value in row.items()}) for row in rows)


def profiled_step(gpu: str, llm: str, tensor_parallel: int = 1) -> ProfiledStep:
    """Step model of one profiled replica.

    Examples
    --------
    >>> step = profiled_step("RTX-4090", "Llama-3.1-8B").model
    >>> bool(0.015 < step.decode_seconds([1000]) < 0.03)
    True
    """
    found = {(p.gpu, p.llm, p.tensor_parallel): p for p in profiled_steps()}
    if (gpu, llm, tensor_parallel) not in found:
        known = ", ".join(f"{m} on {g} x{t}" for g, m, t in found)
        raise ParameterError(
            f"There is no layer profile of {llm} on {gpu} x{tensor_parallel}.",
            resolve=f"use {known}, or another source.",
        )
    return found[gpu, llm, tensor_parallel]


def _of_row(row: dict[str, object]) -> ProfiledStep:
    def numbers(name: str) -> Floats:
        return np.array(str(row[name]).split(), dtype=np.float64)

    def at_each(name: str, unit: float) -> Floats:
        values = numbers(name)
        batches = 2.0 ** np.arange(len(values))
        return unit * np.interp(np.arange(1, int(batches[-1]) + 1), batches, values)

    mixed = None
    if isinstance(row["mixed_per_cached_ns"], str):
        mixed = Mixed(
            at_each("mixed_per_cached_ns", 1e-9),
            at_each("mixed_level_us", 1e-6),
            at_each("mixed_per_token_ns", 1e-9),
        )
    rates, knots = at_each("per_cached_ns", 1e-9), numbers("knots_tokens")
    pair_s = 1e-9 * float(numbers("per_pair_ns")[0])
    piece = Piece(knots, 1e-6 * numbers("knots_us"), rates, pair_s, mixed)
    degree = int(str(row["tensor_parallel"]))
    ways = f" x{degree}" if degree > 1 else ""
    model = StepModel(
        (piece,),
        source=f"{row['llm']} on {row['gpu']}{ways}, layer profile, {row['engine']}",
        provenance="derived" if row["provenance"] == "measured" else str(row["provenance"]),
        max_tokens=float(knots[-1]),
        max_decoding=float(len(rates)),
    )
    errors = {
        kind: (
            float(str(row[f"{kind}_mean_error_percent"])),
            float(str(row[f"{kind}_max_error_percent"])),
        )
        for kind in KINDS
    }
    note = row["note"] if isinstance(row["note"], str) else ""
    skew = float(str(row["skew"]))
    names = (str(row["gpu"]), str(row["llm"]))
    return ProfiledStep(*names, degree, str(row["engine"]), model, skew, errors, note)


def all_reduce_s(gpu: str, gpus: int, size_bytes: ArrayLike, engine: str = ENGINE) -> Floats:
    """Time [s] of an all-reduce between GPUs of one machine, as aiconfigurator measured it.

    Parameters
    ----------
    engine
        ``vLLM 0.19.0`` or ``vLLM 0.24.0``; they were measured on different hosts, and without
        NVLink it is the host that decides.
    """
    frame = derived_frame("all_reduce")
    rows = frame[(frame["gpu"] == gpu) & (frame["gpus"] == gpus) & (frame["engine"] == engine)]
    if rows.empty:
        known = ", ".join(sorted(set(frame["gpu"] + " under " + frame["engine"])))
        raise ParameterError(
            f"No all-reduce of {gpus} {gpu} under {engine} is in data/measured.",
            resolve=f"use two of {known}.",
        )
    x, y = rows["message_bytes"].to_numpy(float), rows["us"].to_numpy(float)
    # Linear in the size between knots: a latency and a bandwidth.
    return np.asarray(np.interp(np.asarray(size_bytes, np.float64), x, y) * 1e-6)
