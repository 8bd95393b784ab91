"""Orders such as ``U<C<O<L<=H``: parsed exactly, compared by what follows from them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise, product

from hetero.errors import ParameterError

_SIGN = re.compile(r"(<=|>=|<|>|=)")


@dataclass(frozen=True, slots=True)
class Order:
    """A partial order of named things, closed under transitivity.

    Chains are separated by commas or semicolons; ``<=`` and ``>=`` leave a tie open, ``=`` is one.
    Names are free text without these signs.

    Parameters
    ----------
    text
        The chains, such as ``"2>4>1>8"`` or ``"a>c,a>d,b>c,b>d"``.

    Raises
    ------
    ParameterError
        If the text is not an order, or puts something above itself.

    Examples
    --------
    >>> Order("2>4>1>8").entails(Order("8<2, 4>=1"))
    True
    >>> Order("L=H>U").entails(Order("U<L<=H"))
    True
    >>> Order("L>H>U").entails(Order("U<L<=H"))
    False
    """

    text: str
    _above: dict[tuple[str, str], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        above = self._direct()
        # Warshall's closure; a chain of relations is strict as soon as one of them is.
        names = sorted({name for pair in above for name in pair})
        for middle, high, low in product(names, names, names):
            if (high, middle) in above and (middle, low) in above:
                strict = above[high, middle] or above[middle, low]
                above[high, low] = above.get((high, low), False) or strict
        for name in names:
            if above.get((name, name), False):
                raise ParameterError(
                    f"The order '{self.text}' puts {name} above itself.",
                    resolve="write each thing at one place of the order.",
                )
        object.__setattr__(self, "_above", above)

    def _direct(self) -> dict[tuple[str, str], bool]:
        above: dict[tuple[str, str], bool] = {}
        for chain in re.split("[,;]", self.text):
            names = [part.strip() for part in _SIGN.split(chain)]
            if len(names) < 3 or "" in names:
                raise ParameterError(
                    f"'{self.text}' is not an order.",
                    resolve="write names with <, >, <=, >= or = between them, such as '2>4>1>8'.",
                )
            for (left, right), sign in zip(pairwise(names[::2]), names[1::2], strict=True):
                pairs = {"<": [(right, left)], ">": [(left, right)]}.get(
                    sign[0], [(left, right), (right, left)]
                )
                for pair in pairs:
                    above[pair] = above.get(pair, False) or sign in "<>"
        return above

    @property
    def names(self) -> frozenset[str]:
        """Everything that the order ranks."""
        return frozenset(name for pair in self._above for name in pair)

    def entails(self, other: Order) -> bool:
        """Whether every relation of ``other`` follows from this order."""
        return all(
            pair in self._above and (self._above[pair] or not strict)
            for pair, strict in other._above.items()
        )
