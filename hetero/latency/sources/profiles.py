"""Layer profiles as a latency source: step models of whole replicas, with mixed steps of their own.

RTX 4090, RTX PRO 6000, RTX A6000 and RTX 3090 are not among the other measured sources. Every
profile reduces to a :class:`~hetero.latency.step.StepModel` with a
:class:`~hetero.latency.step.Mixed`; what lies in ``data/measured/profile_steps.csv`` are these
models, so that nothing has to be fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.latency.accuracy import Accuracy
from hetero.latency.frames import derived_frame
from hetero.latency.reduction import simplify
from hetero.latency.sources.profile_tables import LayerProfile, all_reduce_s, layer_profiles
from hetero.latency.sources.raggedness import longest_over_mean, skews
from hetero.latency.step import Mixed, Piece, StepModel
from hetero.streams import stream

Floats = NDArray[np.float64]

# What the reduction is fitted to. Beyond 200,000 cached tokens mixed steps get slower than in
# proportion, by up to three times at 500,000: no workload of the papers goes there.
LONGEST_DECODE_TOKENS = 4096
LONGEST_MIXED_TOKENS = 2048
MOST_CACHED_TOKENS = 200_000
KINDS = ("prefill", "decode", "mixed", "ragged")
_KNOT_ERROR = 0.005


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProfiledStep(Shown):
    """Step model of a profiled replica.

    Attributes
    ----------
    model
        Steps of requests of equal context.
    skew
        See :class:`~hetero.latency.sources.profile_tables.LayerProfile`; NaN where not measured.
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

        Raises
        ------
        ParameterError
            If none was measured between the GPUs of this replica under that engine.
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


def profiled_steps(*, raw: bool = False) -> tuple[ProfiledStep, ...]:
    """Every profiled replica; with ``raw`` reduced anew from the published tables."""
    if raw:
        return tuple(map(reduce_profile, layer_profiles()))
    rows = derived_frame("profile_steps").to_dict("records")
    return tuple(_of_row({str(name): value for name, value in row.items()}) for row in rows)


def profiled_step(
    gpu: str, llm: str, tensor_parallel: int = 1, *, raw: bool = False
) -> ProfiledStep:
    """Step model of one profiled replica.

    Raises
    ------
    ParameterError
        If it was not profiled; names those that were.

    Examples
    --------
    >>> step = profiled_step("RTX-4090", "Llama-3.1-8B").model
    >>> bool(0.015 < step.decode_seconds([1000]) < 0.03)
    True
    """
    found = {(p.gpu, p.llm, p.tensor_parallel): p for p in profiled_steps(raw=raw)}
    if (gpu, llm, tensor_parallel) not in found:
        known = ", ".join(f"{m} on {g} x{t}" for g, m, t in found)
        raise ParameterError(
            f"There is no layer profile of {llm} on {gpu} x{tensor_parallel}.",
            resolve=f"use {known}, or another source.",
        )
    return found[gpu, llm, tensor_parallel]


def reduce_profile(profile: LayerProfile) -> ProfiledStep:
    """Step model of a profile, by least squares of the relative error of whole steps.

    Prefill rows give the time per new token beyond the decode batches and one rate per pair;
    decode rows a level and a rate per batch; mixed rows what :class:`~hetero.latency.step.Mixed`
    holds. Values are held at 0 or more.
    """
    n, b, cached, pairs = profile.step_arguments
    seconds = profile.seconds
    kind = _kinds(profile)
    chunks, rest, pair_s = _prefill(profile, kind == "prefill")
    batches, level, rate = _decode(profile, kind == "decode")
    last = int(batches[-1])

    knots = profile.tokens
    beyond = profile.head(1) + np.interp(knots, chunks, rest)
    small = profile.head(knots) + np.interp(knots, batches, level)
    times = profile.dense(knots) + np.where(knots <= last, small, beyond)
    kept = simplify(knots, times, _KNOT_ERROR)
    decoding = np.arange(1.0, last + 1.0)
    piece = Piece(knots[kept], times[kept], np.interp(decoding, batches, rate), pair_s)
    if (kind == "mixed").any():
        rows, mixes = [], np.unique(b[kind == "mixed"])
        for batch in mixes:
            at = (kind == "mixed") & (b == batch)
            columns = np.column_stack([cached[at], np.ones(at.sum()), (n - b)[at]])
            base = piece.seconds(n[at], 0, 0.0, pairs[at])
            rows.append(_fit(columns, seconds[at] - base, seconds[at]))
        levels = (np.interp(decoding, mixes, column) for column in np.array(rows).T)
        piece = replace(piece, mixed=Mixed(*levels))
    degree = f" x{profile.tensor_parallel}" if profile.tensor_parallel > 1 else ""
    model = StepModel(
        (piece,),
        source=f"{profile.llm} on {profile.gpu}{degree}, layer profile, {profile.engine}",
        provenance=profile.provenance,
        max_tokens=float(profile.tokens[-1]),
        max_decoding=float(last),
    )
    errors = dict.fromkeys(KINDS, (np.nan, np.nan))
    for name in KINDS[:3]:
        at = kind == name
        if at.any():
            a = Accuracy.of(model.seconds(n[at], b[at], cached[at], pairs[at]), seconds[at])
            errors[name] = (a.mape_percent, a.max_percent)
    found = ProfiledStep(
        profile.gpu, profile.llm, profile.tensor_parallel, profile.engine, model, profile.skew,
        errors, profile.note,
    )  # fmt: skip
    if not np.isnan(profile.skew):
        a = ragged_accuracy(profile, found)
        errors["ragged"] = (a.mape_percent, a.max_percent)
    return found


def ragged_accuracy(profile: LayerProfile, step: ProfiledStep, *, seed: int = 0) -> Accuracy:
    """Error on decode steps of requests drawn from the conversation trace's twin.

    The step model knows only their number and their sum, and for the raggedness what
    :func:`longest_over_mean` expects; the profile is asked for every batch as it is.
    """
    from hetero.workload import load

    trace = load("azure2023_conv")
    key = (profile.gpu, profile.llm, profile.tensor_parallel)
    model = step.ragged(longest_over_mean(trace, int(step.model.max_decoding), seed=seed))
    rng = stream(seed, "ragged")
    own, profiled = [], []
    for b in np.unique(profile.decoding[profile.chunk_tokens == 0]).astype(int).tolist():
        for _ in range(40 if b > 1 else 0):
            drawn = rng.integers(0, len(trace), b)
            contexts = trace.input_tokens[drawn] + rng.random(b) * trace.output_tokens[drawn]
            if contexts.sum() <= MOST_CACHED_TOKENS:
                own.append(float(model.decode_seconds(contexts)))
                share = float(skews(*key, b, default=profile.skew))
                profiled.append(profile.ragged_seconds(contexts, share))
    return Accuracy.of(own, profiled)


def _kinds(profile: LayerProfile) -> NDArray[np.str_]:
    """Kind of each row that the fit rests on; empty for rows out of its range."""
    q, b = profile.chunk_tokens, profile.decoding
    start, context = profile.start_tokens, profile.context_tokens
    inside = (b * context <= MOST_CACHED_TOKENS) & (context <= LONGEST_DECODE_TOKENS)
    inside &= start <= LONGEST_DECODE_TOKENS
    shorter = (start <= LONGEST_MIXED_TOKENS) & (context <= LONGEST_MIXED_TOKENS)
    kind = np.where(q == 0, "decode", np.where(b == 0, "prefill", "mixed"))
    return np.where(inside & ((kind != "mixed") | shorter), kind, "")


def _fit(columns: Floats, values: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 that minimise the error of ``values`` as shares of whole steps."""
    weighted = columns / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    solved = lsq_linear(weighted / scale, values / seconds, (0.0, np.inf))
    return np.asarray(solved.x / scale)


def _prefill(profile: LayerProfile, rows: NDArray[np.bool_]) -> tuple[Floats, Floats, float]:
    """Chunk sizes, attention time apart from pairs at each, and time per pair."""
    q = profile.chunk_tokens[rows]
    chunks, group = np.unique(q, return_inverse=True)
    each = np.eye(len(chunks))[group]
    _, _, _, pairs = profile.step_arguments
    columns = np.column_stack([each, pairs[rows]])
    found = _fit(columns, profile.attention_s[rows], profile.seconds[rows])
    return chunks, found[:-1], float(found[-1])


def _decode(profile: LayerProfile, rows: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Decode batches, and level and time per cached token of attention at each."""
    b = profile.decoding[rows]
    cached = (profile.decoding * profile.context_tokens)[rows]
    attention, seconds = profile.attention_s[rows], profile.seconds[rows]
    batches = np.unique(b)
    found = []
    for batch in batches:
        at = b == batch
        columns = np.column_stack([np.ones(at.sum()), cached[at]])
        found.append(_fit(columns, attention[at], seconds[at]))
    level, rate = np.array(found).T
    return batches, level, rate


def to_rows(steps: Iterable[ProfiledStep]) -> list[dict[str, object]]:
    """Rows of ``data/measured/profile_steps.csv``; rates at the decode batches 1, 2, 4, ..."""
    rows: list[dict[str, object]] = []
    for step in steps:
        piece = step.model.pieces[0]
        batches = _batches(int(step.model.max_decoding)) - 1
        mixed = piece.mixed_rows[:, batches] if piece.mixed is not None else np.zeros((3, 0))
        row: dict[str, object] = {
            "gpu": step.gpu,
            "llm": step.llm,
            "tensor_parallel": step.tensor_parallel,
            "engine": step.engine,
            "provenance": step.model.provenance,
            "knots_tokens": " ".join(f"{n:.0f}" for n in piece.knots_tokens),
            "knots_us": _words(1e6 * piece.knots_s),
            "per_cached_ns": _words(1e9 * piece.per_cached_token_s[batches]),
            "per_pair_ns": _words(1e9 * np.array([piece.per_pair_s])),
            "mixed_per_cached_ns": _words(1e9 * mixed[0]),
            "mixed_level_us": _words(1e6 * mixed[1]),
            "mixed_per_token_ns": _words(1e9 * mixed[2]),
            "skew": None if np.isnan(step.skew) else step.skew,
        }
        for kind in KINDS:
            mean, largest = (None if np.isnan(e) else round(e, 2) for e in step.errors[kind])
            row |= {f"{kind}_mean_error_percent": mean, f"{kind}_max_error_percent": largest}
        rows.append(row | {"note": step.note})
    return rows


def _words(values: Floats) -> str:
    return " ".join(np.format_float_positional(v, 5, False, False, "-") for v in values)


def _batches(last: int) -> NDArray[np.int64]:
    return 2 ** np.arange(int(np.log2(last)) + 1)


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
    rates = at_each("per_cached_ns", 1e-9)
    knots = numbers("knots_tokens")
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
