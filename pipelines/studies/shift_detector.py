r"""When the workload has changed: lengths and rate watched at a stated rate of false alarms.

Requests are looked at in blocks of B. A block gives three figures: the mean logarithm of the
inputs, that of the outputs, and the logarithm of the rate. In units of their standard deviation in
a reference stream, :math:`z_t`, each has two cumulative sums

.. math::
    S^+_t = \max(0, S^+_{t-1} + z_t - k), \qquad S^-_t = \max(0, S^-_{t-1} - z_t - k)

and the first of the six that exceeds h raises an alarm. The slack k is half the shift that should
be found soonest. h is calibrated: streams of the length of a horizon are drawn from the reference
in runs of consecutive blocks, so that bursts and drifts of that length stay in them, and h is the
quantile of their largest sums at one minus the false-alarm probability.

ThunderServe's profiler watches the average prompt and output length (Appendix E) and does not say
when a shift is obvious; this is our answer. The sums are Page's (1954).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import require
from hetero.streams import stream
from hetero.workload import Trace

FIGURES = ("input length", "output length", "rate")
_LEAST_BLOCKS = 20
_RUN = 5  # consecutive blocks that calibration keeps together
_STREAMS = 2000


@dataclass(frozen=True, slots=True)
class Alarm:
    """A shift that was found.

    Attributes
    ----------
    request, time_s
        Request at which it was found, and its arrival.
    figure
        What shifted, one of :data:`FIGURES`.
    factor
        Geometric mean of the figure since the shift, over that of the reference.
    since
        First request of the block in which the sum that alarmed last left zero: about where
        the shift began.
    """

    request: int
    time_s: float
    figure: str
    factor: float
    since: int

    def __str__(self) -> str:
        return (
            f"{self.figure} x {self.factor:.2f} since about request {self.since:,}, found at "
            f"request {self.request:,} ({self.time_s:.0f} s)"
        )


@dataclass(frozen=True, repr=False, eq=False)
class ShiftDetector(Shown):
    """A calibrated detector; made by :meth:`calibrate`.

    Source: ThunderServe, section 4: detection of a workload shift, by a rule of our own.

    Attributes
    ----------
    means, deviations
        Of the three figures over the blocks of the reference, shape (3,).
    threshold
        Sum h that raises an alarm [standard deviations].
    false_alarm
        Probability of any alarm while a horizon of requests like the reference passes.
    """

    block_requests: int
    slack: float
    horizon_requests: int
    false_alarm: float
    means: Floats
    deviations: Floats
    threshold: float
    reference: str = ""

    @classmethod
    def calibrate(
        cls,
        reference: Trace,
        *,
        block_requests: int = 50,
        horizon_requests: int = 20_000,
        false_alarm: float = 0.01,
        slack: float = 0.5,
        seed: int = 0,
    ) -> ShiftDetector:
        """Detector of departures from a reference stream.

        Parameters
        ----------
        block_requests
            B; an alarm comes at the end of a block.
        horizon_requests, false_alarm
            The promise: at most this probability of any alarm while so many requests pass that
            are like the reference.
        slack
            k, half the shift to find soonest [standard deviations of a block].

        Examples
        --------
        >>> from hetero import workload
        >>> chats = workload.load("azure2023_conv")
        >>> detector = ShiftDetector.calibrate(chats.head(5000))
        >>> bool(2 < detector.threshold < 60)
        True
        """
        require(
            0 < false_alarm < 1 and slack >= 0 and block_requests >= 2,
            f"false_alarm is {false_alarm}, slack {slack}, block_requests {block_requests}.",
            resolve="give a probability between 0 and 1, 0 or more, and 2 requests or more.",
        )
        require(
            horizon_requests >= block_requests,
            f"A horizon of {horizon_requests} requests holds no block of {block_requests}.",
            resolve="give a longer horizon, or shorter blocks.",
        )
        figures = _figures(reference, block_requests)
        require(
            len(figures) >= _LEAST_BLOCKS,
            f"{len(reference)} requests make {len(figures)} blocks of {block_requests}; a "
            f"reference needs {_LEAST_BLOCKS}.",
            resolve="give a longer reference, or shorter blocks.",
        )
        means, deviations = figures.mean(axis=0), figures.std(axis=0, ddof=1)
        # A figure that never varies would alarm at rounding errors.
        deviations = np.maximum(deviations, 1e-6)
        z = (figures - means) / deviations
        rng = stream(seed, "shift detector")
        blocks = horizon_requests // block_requests
        starts = rng.integers(0, len(z) - _RUN + 1, size=(_STREAMS, -(-blocks // _RUN)))
        index = (starts[:, :, None] + np.arange(_RUN)).reshape(_STREAMS, -1)[:, :blocks]
        largest = np.zeros(_STREAMS)
        above, below = np.zeros((_STREAMS, 3)), np.zeros((_STREAMS, 3))
        for t in range(blocks):
            here = z[index[:, t]]
            above = np.maximum(0.0, above + here - slack)
            below = np.maximum(0.0, below - here - slack)
            largest = np.maximum(largest, np.maximum(above, below).max(axis=1))
        return cls(
            block_requests=block_requests,
            slack=slack,
            horizon_requests=horizon_requests,
            false_alarm=false_alarm,
            means=means,
            deviations=deviations,
            threshold=float(np.quantile(largest, 1.0 - false_alarm, method="higher")),
            reference=reference.name,
        )

    def first(self, trace: Trace, start: int = 0) -> Alarm | None:
        """The first alarm of a stream from a request on, None if there is none."""
        figures = _figures(trace, self.block_requests, start)
        z = (figures - self.means) / self.deviations
        sums = np.zeros((2, 3))
        left_zero = np.zeros((2, 3), np.int64)
        for t, here in enumerate(z):
            left_zero[sums == 0.0] = t
            sums = np.maximum(0.0, sums + np.stack([here, -here]) - self.slack)
            if sums.max() > self.threshold:
                side, k = np.unravel_index(int(sums.argmax()), sums.shape)
                begin = int(left_zero[side, k])
                request = start + (t + 1) * self.block_requests - 1
                return Alarm(
                    request=request,
                    time_s=float(trace.arrival_s[request]),
                    figure=FIGURES[int(k)],
                    factor=float(np.exp(float(figures[begin : t + 1, k].mean() - self.means[k]))),
                    since=start + begin * self.block_requests,
                )
        return None

    def delay_requests(self, factor: float, figure: str) -> float:
        """Expected requests from a shift of a figure by a factor to its alarm.

        The sum grows by the shift less the slack per block; infinite for shifts that the slack
        swallows.
        """
        require(
            figure in FIGURES and factor > 0,
            f"A shift of '{figure}' by a factor of {factor}.",
            resolve=f"use a factor above 0 and one of {', '.join(FIGURES)}.",
        )
        drift = abs(np.log(factor)) / self.deviations[FIGURES.index(figure)] - self.slack
        if drift <= 0:
            return float("inf")
        return float(self.block_requests * np.ceil(self.threshold / drift))

    def table(self) -> Table:
        """Reference and what it takes to notice a shift, per figure."""

        def after(factor: float) -> Callable[[int], float]:
            return lambda k: self.delay_requests(factor, FIGURES[k])

        columns = (
            Column("figure", of=lambda k: FIGURES[k]),
            Column("geometric mean", "tokens; req/s", of=lambda k: float(np.exp(self.means[k]))),
            Column("spread of a block", "factor", 3, lambda k: float(np.exp(self.deviations[k]))),
            Column("found after, x 1.25", "requests", of=after(1.25)),
            Column("found after, x 2", "requests", of=after(2.0)),
        )
        note = (
            f"an alarm at {self.threshold:.1f} standard deviations: by calibration, "
            f"{100 * self.false_alarm:g} % of streams of {self.horizon_requests:,} requests like "
            f"{self.reference} raise one"
        )
        return Table.of("Shift detector", columns, range(len(FIGURES)), note)


def _figures(trace: Trace, block_requests: int, start: int = 0) -> Floats:
    """Mean log input, mean log output and log rate of every whole block; shape (T, 3)."""
    count = (len(trace) - start) // block_requests
    stop = start + count * block_requests

    def blocks(values: NDArray[np.generic]) -> Floats:
        return values[start:stop].astype(np.float64).reshape(count, block_requests)

    inputs = np.log(blocks(trace.input_tokens)).mean(axis=1)
    outputs = np.log1p(blocks(trace.output_tokens)).mean(axis=1)
    # A block lasts until the next one begins; the gap before its first request belongs to it.
    ends = blocks(trace.arrival_s)[:, -1]
    before = trace.arrival_s[start - 1] if start else trace.arrival_s[0]
    lengths = np.diff(np.concatenate([[float(before)], ends]))
    return np.column_stack([inputs, outputs, np.log(block_requests / np.maximum(lengths, 1e-3))])
