r"""States of a service: machines that are lost and replaced, and the cheapest set that holds.

A machine that is lost after an exponential time of rate :math:`\ell` [1/h] and replaced
:math:`\tau` [h] later is there for :math:`a = 1 / (1 + \ell \tau)` of the time, independently of
the others: of n alike, k serve for a share :math:`\binom nk a^k (1 - a)^{n - k}` of the time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
from scipy.stats import binom

from hetero.arrays import Floats, Ints
from hetero.simulator import Event
from hetero.simulator.replicas import What

Kind: TypeAlias = tuple[int, tuple[int, ...]]
"""A kind of machine of a market and how it is divided."""

Key = TypeVar("Key")
Found = TypeVar("Found")


def availability(losses_per_h: float, replace_s: float) -> float:
    """Share of the time that a machine serves.

    Examples
    --------
    >>> availability(0.1, 3600.0)
    0.9090909090909091
    """
    return 1.0 / (1.0 + losses_per_h * replace_s / 3600.0)


def states(numbers: Sequence[int], serving: Sequence[float]) -> tuple[Floats, Ints]:
    """Share of the time of every state and the machines that serve in it, the most frequent first.

    Shapes (S,) and (S, kinds).

    Examples
    --------
    >>> share, up = states([2], [0.9])
    >>> share.round(2).tolist(), up.ravel().tolist()
    ([0.81, 0.18, 0.01], [2, 1, 0])
    """
    each = [n + 1 for n in numbers]
    up = np.indices(each).reshape(len(each), math.prod(each)).T
    share = np.prod(binom.pmf(up, np.array(numbers), np.array(serving)), axis=1)
    order = np.argsort(-share, kind="stable")
    return share[order], up[order]


def cheapest_set(
    usd_per_h: Mapping[Key, float],
    allowed: Callable[[dict[Key, int]], bool],
    holds: Callable[[dict[Key, int]], Found | None],
    tries: int,
) -> Found | None:
    """What ``holds`` finds for the first set of machines that holds, in order of price.

    What adds to a set that is not allowed is left out; None if none of so many sets holds.

    Examples
    --------
    >>> def holds(counts: dict[str, int]) -> dict[str, int] | None:
    ...     return counts if 2 * counts.get("a", 0) + 3 * counts.get("b", 0) >= 5 else None
    >>> cheapest_set({"a": 1.0, "b": 1.4}, lambda counts: counts.get("b", 0) < 2, holds, 100)
    {'a': 1, 'b': 1}
    """
    keys, prices = [*usd_per_h], [*usd_per_h.values()]
    queue = [(0.0, (0,) * len(keys))]
    for _ in range(tries):
        if not queue:
            break
        less = heapq.heappop(queue)[1]  # negative: at one price the first kinds come first
        if (found := holds(_counts(keys, less))) is not None:
            return found
        for k in range(max((k for k, n in enumerate(less) if n), default=0), len(keys)):
            more = (*less[:k], less[k] - 1, *less[k + 1 :])
            if allowed(_counts(keys, more)):
                heapq.heappush(
                    queue, (sum(-n * usd for n, usd in zip(more, prices, strict=True)), more)
                )
    return None


def _counts(keys: Sequence[Key], less: Sequence[int]) -> dict[Key, int]:
    return {key: -n for key, n in zip(keys, less, strict=True) if n}


@dataclass(frozen=True, slots=True)
class Rental:
    """One machine in one place of the fleet.

    Attributes
    ----------
    place
        Its number among the machines of its kind.
    ordered_s, ready_s, end_s
        When it is ordered, would serve, and begins to drain or is lost [s].
    lost
        Whether it is lost.
    """

    place: int
    ordered_s: float
    ready_s: float
    end_s: float
    lost: bool = False

    @property
    def serves(self) -> bool:
        """Whether it is ready before it is given back."""
        return self.ready_s < self.end_s

    def losses(
        self, losses_per_h: float, start_s: float, draws: np.random.Generator
    ) -> Iterator[Rental]:
        """The same where the machine is lost at a rate and ordered again at once."""
        one = self
        while losses_per_h > 0 and one.serves:
            lost_s = one.ready_s + draws.exponential(3600.0 / losses_per_h)
            if lost_s >= one.end_s:
                break
            yield replace(one, end_s=lost_s, lost=True)
            one = replace(one, ordered_s=lost_s, ready_s=lost_s + start_s)
        yield one


def events(
    own: Sequence[Rental], names: Sequence[str], end_s: float, drain_s: float = 0.0
) -> Iterator[Event]:
    """What happens to the replicas of one place until the end of a day, in order of time."""
    what: list[tuple[float, What]] = [(0.0, "fail")]
    for one in own:
        if one.serves:
            what.append((one.ready_s, "recover"))
            if one.lost:
                what.append((one.end_s, "fail"))
            elif one.end_s < end_s:
                what += [(one.end_s, "drain"), (one.end_s + drain_s, "fail")]
    return (Event(time_s, name, kind) for time_s, kind in what for name in names)
