"""The step model: one latency contract for a replica that every source reduces to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError, require, require_not_negative

# Tokens between two knots: slopes over less overflow, while rounding parts some by 1e-13.
_NEAREST = 1e-100


def _freeze(holder: object, *names: str) -> None:
    """Make fields arrays of numbers that nobody can write to; those that are None stay."""
    for name in names:
        if (value := getattr(holder, name)) is not None:
            array = np.ascontiguousarray(value, dtype=np.float64)
            array.setflags(write=False)
            object.__setattr__(holder, name, array)


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """What steps that prefill and decode at once cost in another way than steps of either kind.

    Attention kernels give up there what they do for decoding alone, and tiles of the prefill are
    laid out for every decoding request.

    Attributes
    ----------
    per_cached_token_s, level_s, per_token_s
        Shape (B,), while 1, 2, ..., B requests decode: time per cached token read [s], in place
        of the rate of a decode step; time of the step itself [s]; and time per prefill token [s],
        both on top of what the piece says. Beyond B the last value holds.
    """

    per_cached_token_s: Floats
    level_s: Floats
    per_token_s: Floats

    def __post_init__(self) -> None:
        _freeze(self, "per_cached_token_s", "level_s", "per_token_s")

    @property
    def rows(self) -> Floats:
        """The three arrays, one below the other; shape (3, B)."""
        return np.array([self.per_cached_token_s, self.level_s, self.per_token_s])


@dataclass(frozen=True, slots=True, eq=False)
class Bends:
    """What decode steps cost on top of a line over their cached tokens.

    Attention kernels divide long contexts among more processors, and read them slower or faster
    for it.

    Attributes
    ----------
    context_tokens
        Shape (K,), whole and increasing, K >= 2; mean cached tokens of the decoding requests.
    extra_s
        Shape (B, K), at least 0; time on top while 1, 2, ..., B requests decode [s], linear
        between the contexts; below the first and beyond the last its value stays. Beyond B it is
        that of B requests with as many cached tokens together.
    """

    context_tokens: Floats
    extra_s: Floats

    def __post_init__(self) -> None:
        _freeze(self, "context_tokens", "extra_s")

    @property
    def slopes_s(self) -> Floats:
        """Change of the extra time per cached token behind each context, 0 last; shape (B, K)."""
        batch = np.arange(1.0, len(self.extra_s) + 1.0)[:, None]
        slope = np.diff(self.extra_s, axis=1) / (np.diff(self.context_tokens) * batch)
        return np.hstack([slope, np.zeros_like(batch)])

    def seconds(self, decoding: ArrayLike, cached: ArrayLike) -> Floats:
        """Time on top [s] of decode steps of ``decoding`` requests, ``cached`` tokens together."""
        b, c = np.broadcast_arrays(np.asarray(decoding, np.int64), np.asarray(cached, np.float64))
        row = np.clip(b - 1, 0, len(self.extra_s) - 1)
        x = self.context_tokens * (row[..., None] + 1.0)
        at = np.maximum((x <= c[..., None]).sum(axis=-1) - 1, 0)
        beyond = np.maximum(c - np.take_along_axis(x, at[..., None], axis=-1)[..., 0], 0.0)
        return np.asarray(self.extra_s[row, at] + self.slopes_s[row, at] * beyond)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One affine piece of a step model.

    Attributes
    ----------
    knots_tokens
        Shape (K,), strictly increasing, first knot >= 0; new tokens ``n`` of a step.
    knots_s
        Shape (K,); time at each knot [s]. Linear between knots; below the first knot its value
        (the floor); beyond the last knot the slope of the last segment goes on (0 if K = 1).
    per_cached_token_s
        Shape (B,); time per cached token read [s] while 1, 2, ..., B requests decode. Beyond B
        the last value holds.
    per_pair_s
        Time per prefill query-key pair [s].
    mixed
        What steps with prefill and decode tokens cost in another way, for the same B; None: they
        cost the sum of both.
    decode_level_s
        Shape (B,): time on top of ``knots_s`` of steps in which all of 1, 2, ..., B requests
        decode, negative where a prefill of as many tokens takes longer; None: as long.
    bends
        What such steps cost on top of a line over their cached tokens, for the same B; None:
        nothing.
    """

    knots_tokens: Floats
    knots_s: Floats
    per_cached_token_s: Floats
    per_pair_s: float = 0.0
    mixed: Mixed | None = None
    decode_level_s: Floats | None = None
    bends: Bends | None = None

    def __post_init__(self) -> None:
        _freeze(self, "knots_tokens", "knots_s", "per_cached_token_s", "decode_level_s")
        good = (
            self.knots_tokens.ndim == self.knots_s.ndim == self.per_cached_token_s.ndim == 1
            and len(self.knots_tokens) == len(self.knots_s) >= 1
            and len(self.per_cached_token_s) >= 1
            and bool(np.all(np.diff(self.knots_tokens) > 0))
            and self.knots_tokens[0] >= 0
            and bool(np.all(np.diff(self.knots_tokens) >= _NEAREST))
            and all(
                bool(np.all(np.isfinite(a) & (a >= 0)))
                for a in (self.knots_s, self.per_cached_token_s, self.mixed_rows)
            )
            and self.mixed_rows.shape == (3, len(self.per_cached_token_s))
            and self.levels.shape == self.per_cached_token_s.shape
            and bool(np.all(np.isfinite(self.levels)))
            and bool(np.all(self._base(np.arange(1.0, len(self.levels) + 1.0)) + self.levels >= 0))
            and self._bends_are_good()
            and np.isfinite(self.per_pair_s)
            and self.per_pair_s >= 0
        )
        if not good:
            raise ParameterError(
                "A step model needs increasing token knots and finite times >= 0; received "
                f"token knots {_brief(self.knots_tokens)}, their times {_brief(self.knots_s)} s, "
                f"times per cached token {_brief(self.per_cached_token_s)} s and per pair "
                f"{self.per_pair_s:.3g} s"
                + ("." if self.bends is None else ", with bends that must not let it fall."),
                resolve="fit with the non-negative variant, or drop the rows that force a "
                "negative time.",
            )

    @property
    def mixed_rows(self) -> Floats:
        """Rate, level and time per prefill token of mixed steps; shape (3, B)."""
        if self.mixed is not None:
            return self.mixed.rows
        none = np.zeros_like(self.per_cached_token_s)
        return np.array([self.per_cached_token_s, none, none])

    @property
    def levels(self) -> Floats:
        """Time of decode steps on top of the knots [s]; shape (B,)."""
        level = self.decode_level_s
        return np.zeros_like(self.per_cached_token_s) if level is None else level

    def _bends_are_good(self) -> bool:
        if self.bends is None:
            return True
        x, extra = self.bends.context_tokens, self.bends.extra_s
        shaped = x.ndim == 1 and len(x) >= 2
        if not shaped or extra.shape != (len(self.per_cached_token_s), len(x)):
            return False
        rate = self.per_cached_token_s[:, None]
        return bool(
            np.all(np.diff(x) > 0)
            and np.all((x >= 0) & (x == np.round(x)))
            and np.all(np.isfinite(extra) & (extra >= 0))
            and np.all(self.bends.slopes_s + rate >= -1e-9 * rate)
        )

    def _base(self, n: Floats) -> Floats:
        base = np.interp(n, self.knots_tokens, self.knots_s)
        if len(self.knots_tokens) > 1:
            slope = (self.knots_s[-1] - self.knots_s[-2]) / (
                self.knots_tokens[-1] - self.knots_tokens[-2]
            )
            base = base + slope * np.maximum(n - self.knots_tokens[-1], 0.0)
        return np.asarray(base)

    def seconds(
        self, tokens: ArrayLike, decoding: ArrayLike, cached: ArrayLike, pairs: ArrayLike
    ) -> Floats:
        """Time of this piece [s]; arguments broadcast, see :meth:`StepModel.seconds`."""
        n = np.asarray(tokens, dtype=np.float64)
        base = self._base(n)
        at = np.clip(np.asarray(decoding, np.int64) - 1, 0, len(self.per_cached_token_s) - 1)
        rate = self.per_cached_token_s[at]
        alone = (np.asarray(decoding) > 0) & (n <= np.asarray(decoding))
        if self.decode_level_s is not None:
            base = base + np.where(alone, self.decode_level_s[at], 0.0)
        if self.bends is not None:
            base = base + np.where(alone, self.bends.seconds(decoding, cached), 0.0)
        if self.mixed is not None:
            prefill = n - np.asarray(decoding, np.float64)
            is_mixed = (prefill > 0) & (np.asarray(decoding) > 0)
            extra = self.mixed.level_s[at] + self.mixed.per_token_s[at] * prefill
            rate = np.where(is_mixed, self.mixed.per_cached_token_s[at], rate)
            base = base + np.where(is_mixed, extra, 0.0)
        return np.asarray(
            base + rate * np.asarray(cached, np.float64) + self.per_pair_s * np.asarray(pairs)
        )


def _brief(values: Floats) -> str:
    if values.ndim != 1 or len(values) == 0:
        return f"of shape {values.shape}"
    return f"{values.min():.3g} to {values.max():.3g} ({len(values)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepModel(Shown):
    r"""Time of one engine step of a replica.

    .. math::
        step\_s = \max_{i \le 2} [\, token\_s_i(n) + per\_cached\_token\_s_i(b)\, c
                  + per\_pair\_s_i \cdot pairs \,]

    with ``n`` new tokens in the step (prefill chunks and one token per decoding request),
    ``b`` decoding requests that read ``c`` cached tokens together, and ``pairs`` prefill
    query-key pairs, the sum over chunks of ``q (start + q/2)`` for ``q`` tokens after ``start``
    cached ones. A decode step is ``n = b, pairs = 0``; a whole prefill is ``n`` = sum of inputs
    and ``c = 0``; a mixed step is ``n > b > 0``, and where a piece has a :class:`Mixed` it reads
    its cache at a rate of its own and adds ``level(b) + per_token(b) (n - b)``. Xiong et al. eq.
    3-4 is the special case of one piece.

    Attributes
    ----------
    pieces
        One or two pieces; the second carries kinks such as communication hidden by compute.
    source
        Where the numbers come from, in words.
    provenance
        ``measured``, ``derived``, ``estimated`` or ``assumed``.
    level
        What is known of them, one of :data:`hetero.latency.calibration.expected.LEVELS`, by which
        their error is expected; empty for what is known of the GPU.
    request_s
        What the engine takes for a request beside its steps: before the first, and from the end of
        a step to the token at the client [s].
    prompt_token_s
        The same for each token of its prompt [s].
    max_tokens, max_decoding
        Range of the measurements or of the validity of the model; beyond it the pieces
        extrapolate as :class:`Piece` says, and :meth:`inside` answers False.

    Examples
    --------
    >>> model = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> round(float(model.prefill_seconds([512])), 6)
    0.0712
    >>> round(float(model.decode_seconds([100, 300])), 6)
    0.02024
    """

    pieces: tuple[Piece, ...]
    source: str
    provenance: str
    max_tokens: float = np.inf
    max_decoding: float = np.inf
    level: str = ""
    request_s: float = 0.0
    prompt_token_s: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative(request_s=self.request_s, prompt_token_s=self.prompt_token_s)
        require(
            1 <= len(self.pieces) <= 2,
            f"A step model has one or two pieces; received {len(self.pieces)}.",
            resolve="merge pieces, or reduce the source with fewer kinks.",
        )

    @classmethod
    def affine(
        cls,
        *,
        floor_s: float,
        per_token_s: float,
        per_cached_token_s: float,
        per_pair_s: float = 0.0,
        source: str = "given coefficients",
        provenance: str = "assumed",
    ) -> StepModel:
        """One piece, ``floor_s + per_token_s n + per_cached_token_s c + per_pair_s pairs`` [s]."""
        piece = Piece(
            knots_tokens=np.array([0.0, 1.0]),
            knots_s=np.array([floor_s, floor_s + per_token_s]),
            per_cached_token_s=np.array([per_cached_token_s]),
            per_pair_s=per_pair_s,
        )
        return cls((piece,), source=source, provenance=provenance)

    def seconds(
        self,
        tokens: ArrayLike,
        decoding: ArrayLike = 0,
        cached: ArrayLike = 0.0,
        pairs: ArrayLike = 0.0,
    ) -> Floats:
        """Time [s] of a step of new ``tokens``, ``decoding`` requests, ``cached``, ``pairs``."""
        times = [piece.seconds(tokens, decoding, cached, pairs) for piece in self.pieces]
        return times[0] if len(times) == 1 else np.maximum(times[0], times[1])

    def prefill_seconds(self, inputs: ArrayLike, start: ArrayLike = 0.0) -> Floats:
        """Time [s] to prefill a batch of ``inputs`` tokens each, after ``start`` cached ones."""
        q = np.asarray(inputs, dtype=np.float64)
        return self.seconds(q.sum(), 0, 0.0, (q * (np.asarray(start, np.float64) + q / 2.0)).sum())

    def decode_seconds(self, cached: ArrayLike) -> Floats:
        """Time [s] of one decode step of requests with ``cached`` tokens each."""
        c = np.asarray(cached, dtype=np.float64)
        return self.seconds(float(c.size), c.size, c.sum())

    def table(self) -> Table:
        """One row per knot and piece, the other rates in the notes."""
        rows = tuple(
            (i + 1, float(n), 1e3 * float(t))
            for i, piece in enumerate(self.pieces)
            for n, t in zip(piece.knots_tokens, piece.knots_s, strict=True)
        )
        notes = [
            f"piece {i + 1}: {1e9 * piece.per_cached_token_s[0]:.4g} ns per cached token with one "
            f"request decoding, {1e9 * piece.per_cached_token_s[-1]:.4g} ns with "
            f"{len(piece.per_cached_token_s)} or more; {1e9 * piece.per_pair_s:.4g} ns per pair"
            for i, piece in enumerate(self.pieces)
        ]
        notes.append(
            f"{self.provenance}; covers {self.max_tokens:,.0f} new tokens and "
            f"{self.max_decoding:,.0f} decoding requests"
        )
        columns = (Column("piece"), Column("new tokens", digits=6), Column("time", "ms"))
        return Table(f"Step model: {self.source}", columns, rows, tuple(notes))
