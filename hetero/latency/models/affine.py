r"""Xiong et al. eq. 3-4: prefill and decode times affine in batch size and length, and their fit.

.. math::
    T_{prefill} = p_1 b I + p_2 b + p_3 I + p_4, \qquad
    \tau_{decode} = p_5 b L + p_6 b + p_7 L + p_8

with batch ``b`` [requests], longest input ``I`` and cached length per request ``L`` [tokens], times
in seconds. A decode of ``O`` steps after ``I`` tokens sums ``tau`` over ``L = I + 1 ... I + O``;
by linearity it is ``O`` steps at the mean length ``I + (O + 1) / 2``, so totals are fitted as mean
steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import FitError
from hetero.latency.accuracy import Accuracy
from hetero.latency.models.fitting import Weights
from hetero.latency.models.floor import FloorFit, fit_floor
from hetero.latency.models.phase import DECODE, PREFILL, Form, PhaseFit, fit_phase
from hetero.latency.reduction import Reduction
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import Measurements, Phase


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Affine(Shown):
    r"""Prefill and decode times of one instance as Xiong et al. print them (eq. 3-4).

    Attributes
    ----------
    per_batch_token_s, per_request_s, per_longest_token_s, prefill_s
        p1, p2, p3, p4: time per prompt token of the padded batch, per request, per token of the
        longest prompt, and per prefill [s].
    per_cached_token_s, per_decoding_s, per_context_token_s, decode_s
        p5, p6, p7, p8: time per cached token of the batch, per decoding request, per cached token
        of one request, and per decode step [s].
    floor_s
        Least time of a prefill [s]; 0 for the paper's form.
    max_batch
        Largest batch that the decode coefficients cover.
    min_tokens, max_tokens
        Smallest and largest prefill, in tokens of the batch, that the coefficients cover.
    prefills
        Batch sizes and input lengths at which the reduction to a step model is taken, shape (N,)
        each; by default powers of two with at least 64 tokens per request.

    Examples
    --------
    >>> model = Affine(1e-4, 0, 0, 0.01, 1e-7, 1e-3, 2e-7, 0.02, max_batch=4)
    >>> round(float(model.prefill_batch_s(2, 100)), 6)
    0.03
    >>> round(float(model.decode_step_s(4, 1000)), 6)
    0.0246
    >>> round(float(model.step_model().decode_seconds([1000] * 4)), 6)
    0.0246
    """

    per_batch_token_s: float
    per_request_s: float
    per_longest_token_s: float
    prefill_s: float
    per_cached_token_s: float
    per_decoding_s: float
    per_context_token_s: float
    decode_s: float
    floor_s: float = 0.0
    max_batch: int = 256
    min_tokens: float = 1.0
    max_tokens: float = 131072.0
    source: str = "given coefficients"
    provenance: str = "assumed"
    prefills: tuple[Floats, Floats] | None = None

    @classmethod
    def from_fits(
        cls,
        prefill: PhaseFit | FloorFit,
        decode: PhaseFit,
        *,
        source: str = "",
        provenance: str = "derived",
    ) -> Affine:
        """The coefficients of two fits; see :meth:`PhaseFit.four` for the reading of a cross."""
        if isinstance(prefill, FloorFit):
            floor, slope, constant, *rest = map(float, prefill.coefficients)
            four = (slope, rest[0] if rest else 0.0, 0.0, constant)
        else:
            floor, four = 0.0, prefill.four()
        tokens = prefill.batch * prefill.length_tokens
        return cls(
            *four,
            *decode.four(),
            floor_s=floor,
            max_batch=int(decode.batch.max()),
            min_tokens=float(tokens.min()),
            max_tokens=float(tokens.max()),
            source=source or "affine fit",
            provenance=provenance,
            prefills=(prefill.batch, prefill.length_tokens),
        )

    def prefill_batch_s(self, batch: ArrayLike, longest_input_tokens: ArrayLike) -> Floats:
        """Prefill time [s] of a padded batch, eq. 3; inputs broadcast.

        Source: Xiong et al., eq. 3: prefill time of a batch; T_prefill, p1 to p4.
        """
        b, i = np.asarray(batch, np.float64), np.asarray(longest_input_tokens, np.float64)
        line = (
            self.per_batch_token_s * b * i
            + self.per_request_s * b
            + self.per_longest_token_s * i
            + self.prefill_s
        )
        return np.maximum(line, self.floor_s)

    def decode_step_s(self, batch: ArrayLike, context_tokens: ArrayLike) -> Floats:
        """Time [s] of one decode step at ``context_tokens`` cached per request; broadcasts."""
        b, length = np.asarray(batch, np.float64), np.asarray(context_tokens, np.float64)
        return np.asarray(
            self.per_cached_token_s * b * length
            + self.per_decoding_s * b
            + self.per_context_token_s * length
            + self.decode_s
        )

    def decode_batch_s(
        self,
        batch: ArrayLike,
        longest_input_tokens: ArrayLike,
        longest_output_tokens: ArrayLike,
    ) -> Floats:
        """Time [s] of all decode steps of a padded batch, eq. 4; broadcasts.

        Source: Xiong et al., eq. 4: decode time of a batch; T_decode, p5 to p8.
        """
        steps = np.asarray(longest_output_tokens, np.float64)
        mean = np.asarray(longest_input_tokens, np.float64) + (steps + 1.0) / 2.0
        return np.asarray(steps * self.decode_step_s(batch, mean))

    def step_model(self) -> StepModel:
        """The step model this reduces to; :meth:`reduce` also says at what error."""
        return self.reduce().model

    def reduce(self) -> Reduction:
        r"""Step model and its error.

        Decode is carried exactly up to ``max_batch``: ``token_s(b) = p6 b + p8`` and
        ``per_cached_token_s(b) = p5 + p7 / b``. A prefill is carried by its tokens alone,
        ``alpha + beta n``, which is exact where ``p2 = p3 = 0`` and otherwise the closest line in
        squared relative error over :attr:`prefills`. Knots of the decode steps come first; those
        of prefills follow and do not fall below them.
        """
        from scipy.optimize import lsq_linear

        batch, length = self.prefills or self._grid()
        tokens = (batch * length).astype(np.float64)
        printed = self.prefill_batch_s(batch, length)
        constant, slope = self.prefill_s, self.per_batch_token_s
        if self.per_request_s or self.per_longest_token_s:
            rising = (printed > self.floor_s) & (printed > 0.0)
            if not rising.any():
                raise FitError(
                    f"{self.source}: no prefill takes more than {self.floor_s:g} s by these "
                    "coefficients.",
                    resolve="fit with the non-negative variant, or drop the rows that force it.",
                )
            design = np.column_stack([np.ones(rising.sum()), tokens[rising]])
            constant, slope = lsq_linear(
                design / printed[rising, None], np.ones(rising.sum()), bounds=(0.0, np.inf)
            ).x

        largest = float(self.max_batch)
        knots = [0.0, largest]
        times = [self.decode_s, self.decode_s + self.per_decoding_s * largest]
        start = max(self.min_tokens, largest + 1.0)
        end = max(self.max_tokens, start + 1.0)
        # A larger step never takes less time than the largest decode step.
        floor = max(self.floor_s, times[-1])
        bend = (floor - constant) / slope if slope > 0 else 0.0
        for n in sorted({start, *((bend,) if start < bend < end else ()), end}):
            knots.append(n)
            times.append(max(floor, constant + slope * n))
        model = StepModel(
            (
                Piece(
                    np.array(knots),
                    np.array(times),
                    self.per_cached_token_s
                    + self.per_context_token_s / np.arange(1, self.max_batch + 1),
                ),
            ),
            source=self.source,
            provenance=self.provenance,
            max_tokens=self.max_tokens,
            max_decoding=largest,
        )
        contexts = np.array([1.0, 1024.0, 8192.0])
        steps, cached = map(
            np.ravel, np.meshgrid(np.unique(np.geomspace(1, self.max_batch, 8).round()), contexts)
        )
        pairs = tokens * length / 2.0
        accuracy: dict[Phase, Accuracy] = {
            "prefill": _accuracy(model.seconds(tokens, 0, 0.0, pairs), printed),
            "decode": _accuracy(
                model.seconds(steps, steps, steps * cached), self.decode_step_s(steps, cached)
            ),
        }
        return Reduction(
            model,
            accuracy,
            "the step model knows the tokens of a prefill, not its batch size or longest prompt",
        )

    def _grid(self) -> tuple[Floats, Floats]:
        low, high = max(1.0, self.min_tokens), max(self.max_tokens, self.min_tokens + 1.0)
        totals = np.geomspace(low, high, 9)
        batches = 2.0 ** np.arange(0, 1 + int(np.log2(self.max_batch)))
        b, n = map(np.ravel, np.meshgrid(batches, totals))
        keep = n / b >= 64.0
        return b[keep], n[keep] / b[keep]

    def table(self) -> Table:
        """The eight coefficients with their units."""
        rows = [
            (t.name, t.column, 1e6 * value, t.display_unit, t.meaning)
            for t, value in zip(
                (*PREFILL, *DECODE),
                (
                    self.per_batch_token_s,
                    self.per_request_s,
                    self.per_longest_token_s,
                    self.prefill_s,
                    self.per_cached_token_s,
                    self.per_decoding_s,
                    self.per_context_token_s,
                    self.decode_s,
                ),
                strict=True,
            )
        ]
        if self.floor_s:
            rows.append(("floor", "", 1e6 * self.floor_s, "µs", "least time of a prefill"))
        columns = (
            Column("coefficient"),
            Column("multiplies"),
            Column("value", digits=6),
            Column("unit"),
            Column("meaning"),
        )
        return Table(f"Affine latency: {self.source}", columns, tuple(rows), (self.provenance,))


class _Common(TypedDict):
    weights: Weights
    confidence: float
    label: str


def fit(
    measured: Measurements,
    *,
    form: Form = "full",
    weights: Weights = "relative",
    non_negative: bool = False,
    floor: bool = False,
    confidence: float = 0.95,
) -> tuple[PhaseFit | FloorFit | None, PhaseFit | None]:
    """Fit both phases of a table, each None where the table has no rows of it.

    Source: Xiong et al., section 3.1: least-squares fit of the coefficients; p1 to p8.

    Parameters
    ----------
    form
        See :data:`Form`.
    floor
        Fit ``max(floor, a b I + c)`` to the prefills instead of the form.

    Raises
    ------
    FitError
        If the rows of a phase do not determine its coefficients.
    """

    def one(phase: Phase) -> PhaseFit | FloorFit | None:
        rows = measured.phase(phase)
        if not len(rows.batch):
            return None
        data = (rows.batch, rows.length_tokens, rows.seconds)
        common: _Common = {
            "weights": weights,
            "confidence": confidence,
            "label": measured.label,
        }
        if floor and phase == "prefill":
            return fit_floor(*data, **common)
        decode = phase == "decode"
        return fit_phase(*data, decode=decode, form=form, non_negative=non_negative, **common)

    prefill, decode = one("prefill"), one("decode")
    assert not isinstance(decode, FloorFit)
    return prefill, decode


def _accuracy(reduced: Floats, printed: Floats) -> Accuracy:
    """Accuracy where the equations give a time above 0; elsewhere they have nothing to err from."""
    some = printed > 0.0
    return Accuracy.of(reduced[some], printed[some])
