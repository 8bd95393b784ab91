"""Island sizes from a number of islands and a skew (Rignall, section 4.9.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetero.arrays import Flags, Floats
from hetero.errors import InfeasibleError, require, require_not_negative, require_positive
from hetero.planners.rignall.assignment import Inventory, Layout, check_inventory
from hetero.planners.rignall.rates import IslandClass

EVEN = 1e-9  # |skew| below which all islands weigh the same


def divide(total: int, target: int, skew: float, minimum: int = 1) -> tuple[int, ...]:
    r"""Divide GPUs of one type into islands; sizes in the order of the islands.

    With :math:`N = \min(N_{target}, \lfloor G_{total} / I_{min} \rfloor)` islands, each has
    :math:`I_{min}` GPUs, and the rest :math:`G_{total} - N I_{min}` goes to island k in
    proportion to :math:`k^{S_{skew}}`, rounded by the largest remainder.

    Parameters
    ----------
    total
        GPUs of the type, G_total.
    target
        Islands to make, N_target; fewer where the GPUs do not reach for the minimum.
    skew
        S_skew: 0 spreads the rest evenly, above 0 later islands get more, below 0 earlier ones.
    minimum
        Fewest GPUs of an island, I_min.

    Returns
    -------
    tuple of int
        Empty if no island can be made; else all GPUs are used.

    Notes
    -----
    Source: Rignall, section 4.9.2: divider, its preconditions included; N_target, S_skew, I_min.
    Equal remainders go to the island that comes first, which the thesis leaves open.

    Examples
    --------
    >>> divide(100, 5, 0.0, 2), divide(100, 5, 2.0, 2), divide(100, 5, -2.0, 2)
    ((20, 20, 20, 20, 20), (4, 8, 17, 28, 43), (64, 17, 9, 6, 4))
    >>> divide(7, 5, 0.0, 3), divide(2, 5, 0.0, 3)
    ((4, 3), ())
    """
    require(
        minimum >= 1 and total >= 0 and target >= 0 and bool(np.isfinite(skew)),
        f"{total} GPUs in {target} islands of at least {minimum} with skew {skew} are no division.",
        resolve="give a minimum of 1 or more, counts of 0 or more, and a finite skew.",
    )
    count = min(target, total // minimum)
    if not count:
        return ()
    rest = total - count * minimum
    if not rest:
        return (minimum,) * count
    if count == 1:
        return (total,)
    power = 0.0 if abs(skew) < EVEN else skew
    weight = np.arange(1, count + 1, dtype=np.float64) ** power
    ideal = weight / weight.sum() * rest
    sizes = np.floor(ideal).astype(np.int64)
    left = round(rest - float(sizes.sum()))
    sizes[np.argsort(-(ideal - sizes), kind="stable")[:left]] += 1
    return tuple(int(size) for size in sizes + minimum)


# Mutated points keep the parameters of most types, and pools are looked through again and again.
_sizes = lru_cache(maxsize=1 << 14)(divide)


@dataclass(frozen=True, slots=True)
class Divider:
    """Search space with two parameters per GPU type: the number of islands n_t and the skew s_t.

    Source: Rignall, section 4.9.2: search space of the divider; n_t, s_t.

    Attributes
    ----------
    inventory
        GPUs of each type.
    minimum
        Smallest island [GPUs].
    skew
        Largest absolute skew.
    most
        Largest n_t; by default as many islands as the minimum allows.

    Examples
    --------
    >>> space = Divider({"H200": 64, "H20": 128})
    >>> space.names, space.upper.tolist()
    (('n H200', 's H200', 'n H20', 's H20'), [32.0, 5.0, 64.0, 5.0])
    >>> [f"{n} x ({c})" for c, n in space.layout([2, 0.0, 1, 0.0]).items()]
    ['2 x (32 x H200)', '1 x (128 x H20)']
    """

    inventory: Inventory
    minimum: int = 2
    skew: float = 5.0
    most: int | None = None

    def __post_init__(self) -> None:
        require_positive(minimum=self.minimum, most=1 if self.most is None else self.most)
        require_not_negative(skew=self.skew)
        held = check_inventory(self.inventory)
        short = [gpu for gpu, count in held.items() if count < self.minimum]
        if short:
            raise InfeasibleError(
                f"{held[short[0]]} {short[0]} GPUs are fewer than the smallest island, "
                f"{self.minimum}.",
                resolve="lower the minimum, add GPUs of the type, or leave it out.",
            )
        object.__setattr__(self, "inventory", held)

    @property
    def kind(self) -> str:
        """Text that tells this space from others."""
        gpus = " ".join(f"{gpu}={count}" for gpu, count in self.inventory.items())
        return f"divider {gpus} minimum={self.minimum} skew={self.skew:g} most={self.most}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(f"{letter} {gpu}" for gpu in self.inventory for letter in ("n", "s"))

    @property
    def integer(self) -> Flags:
        """Which parameters are whole numbers, shape (2 types,)."""
        return np.tile([True, False], len(self.inventory))

    @property
    def lower(self) -> Floats:
        """Smallest values, shape (2 types,)."""
        return np.tile([1.0, -self.skew], len(self.inventory))

    @property
    def upper(self) -> Floats:
        """Largest values, shape (2 types,)."""
        found = []
        for count in self.inventory.values():
            possible = count // self.minimum
            found += [float(min(self.most or possible, possible)), self.skew]
        return np.array(found)

    @property
    def totals(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Sums that parameters may not exceed: none."""
        return ()

    def layout(self, point: Floats | list[float]) -> Layout:
        """The islands of a point."""
        found: dict[IslandClass, int] = {}
        for t, (gpu, count) in enumerate(self.inventory.items()):
            for size in _sizes(count, round(point[2 * t]), float(point[2 * t + 1]), self.minimum):
                island = IslandClass(gpu, size)
                found[island] = found.get(island, 0) + 1
        return found

    def from_unit(self, unit: Floats) -> Floats:
        """Points of numbers in [0, 1), shape (n, dimensions) both."""
        span = self.upper - self.lower
        whole = self.lower + np.floor(unit * (span + 1.0))
        return np.where(self.integer, np.minimum(whole, self.upper), self.lower + unit * span)

    def mutated(self, points: Floats, random: np.random.Generator, reach: float) -> Floats:
        """Each point with some parameters moved by about ``reach`` of their span."""
        span = self.upper - self.lower
        chosen = random.random(points.shape) < max(0.34, 1.0 / points.shape[1])
        chosen[np.arange(len(points)), random.integers(points.shape[1], size=len(points))] = True
        step = random.normal(0.0, reach, points.shape) * span
        # A whole number that moves does so by at least one.
        least = np.sign(step) * np.maximum(np.abs(step), 1.0)
        step = np.where(self.integer, np.round(least), step)
        return np.clip(points + np.where(chosen, step, 0.0), self.lower, self.upper)
