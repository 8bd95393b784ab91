"""Island sizes as parameters of their own, K slots per GPU type (Rignall, section 4.9.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero.arrays import Flags, Floats
from hetero.errors import require_positive
from hetero.planners.rignall.assignment import Inventory, Layout, check_inventory
from hetero.planners.rignall.rates import IslandClass


@dataclass(frozen=True, slots=True)
class Direct:
    r"""Search space with K integers per GPU type: :math:`\sum_k x_{tk} \le I_t`.

    Source: Rignall, section 4.9.1: direct island generation, K slots per type; x_tk.

    Attributes
    ----------
    inventory
        GPUs of each type.
    slots
        K, islands per type at most.
    minimum
        Smallest island [GPUs]; a slot with fewer GPUs is no island, and they are not used.

    Examples
    --------
    >>> space = Direct({"H200": 64}, slots=3)
    >>> space.names, space.totals
    (('H200 slot 1', 'H200 slot 2', 'H200 slot 3'), (((0, 1, 2), 64),))
    >>> [f"{n} x ({c})" for c, n in space.layout([30, 0, 30]).items()]
    ['2 x (30 x H200)']
    """

    inventory: Inventory
    slots: int = 16
    minimum: int = 2

    def __post_init__(self) -> None:
        require_positive(slots=self.slots, minimum=self.minimum)
        object.__setattr__(self, "inventory", check_inventory(self.inventory))

    @property
    def kind(self) -> str:
        """Text that tells this space from others."""
        gpus = " ".join(f"{gpu}={count}" for gpu, count in self.inventory.items())
        return f"direct {gpus} slots={self.slots} minimum={self.minimum}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(f"{gpu} slot {k + 1}" for gpu in self.inventory for k in range(self.slots))

    @property
    def integer(self) -> Flags:
        """Which parameters are whole numbers: all, shape (K types,)."""
        return np.ones(len(self.names), np.bool_)

    @property
    def lower(self) -> Floats:
        """Smallest values, shape (K types,)."""
        return np.zeros(len(self.names))

    @property
    def upper(self) -> Floats:
        """Largest values, shape (K types,)."""
        return np.repeat(np.array(list(self.inventory.values()), np.float64), self.slots)

    @property
    def totals(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Per GPU type the parameters whose sum is bounded, and the bound."""
        return tuple(
            (tuple(range(t * self.slots, (t + 1) * self.slots)), count)
            for t, count in enumerate(self.inventory.values())
        )

    def layout(self, point: Floats | list[float]) -> Layout:
        """The islands of a point."""
        found: dict[IslandClass, int] = {}
        for t, gpu in enumerate(self.inventory):
            for size in point[t * self.slots : (t + 1) * self.slots]:
                if round(size) >= self.minimum:
                    island = IslandClass(gpu, round(size))
                    found[island] = found.get(island, 0) + 1
        return found

    def from_unit(self, unit: Floats) -> Floats:
        """Points of numbers in [0, 1): uniform over all that the inventory allows.

        K sorted draws cut each type's GPUs into K slots and a rest that stays unused.
        """
        found = np.empty_like(unit)
        for columns, count in self.totals:
            cuts = np.sort(np.floor(unit[:, columns] * (count + 1)), axis=1)
            found[:, columns] = np.diff(np.concatenate([np.zeros((len(unit), 1)), cuts], axis=1))
        return found

    def mutated(self, points: Floats, random: np.random.Generator, reach: float) -> Floats:
        """Each point with GPUs moved from one slot to another, or taken from the unused."""
        found = points.copy()
        for point in found:
            moves = 1 + int(random.poisson(max(0.0, 8.0 * reach)))
            for _ in range(moves):
                columns, count = self.totals[int(random.integers(len(self.totals)))]
                slots = np.array(columns)
                spare = count - point[slots].sum()
                to = int(random.choice(slots))
                full = slots[(point[slots] > 0) & (slots != to)]
                if len(full) and (spare < 1 or random.random() < 0.7):
                    source = int(random.choice(full))
                    amount = _amount(point[source], reach, random)
                    point[source] -= amount
                else:
                    amount = _amount(spare, reach, random)
                point[to] += amount
        return found


def _amount(available: float, reach: float, random: np.random.Generator) -> float:
    """GPUs to move: often all, else a part."""
    if available < 1:
        return 0.0
    if random.random() < 0.3:
        return float(available)
    return float(min(available, 1 + np.floor(random.exponential(reach * available))))
