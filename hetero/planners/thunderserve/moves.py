"""Neighbours of a design by flip, split, merge or move of groups (ThunderServe, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from hetero.costs.groups import (
    PHASES,
    Design,
    Fleet,
    Group,
    Phase,
    design,
    group,
    merged,
    other,
    two_of,
    without,
)

Move: TypeAlias = Literal["flip", "split", "merge", "move"]
MOVES: tuple[Move, ...] = ("flip", "split", "merge", "move")
Part: TypeAlias = tuple[Group, Phase]


def neighbour(fleet: Fleet, current: Design, move: Move, rng: np.random.Generator) -> Design | None:
    """A random neighbour by one move, None where the draw leads to none.

    Early checks: every new group's memory together holds the weights, and both phases remain.

    Source: ThunderServe, section 3.2: tabu neighbourhoods, by flip, split, merge and move; g_(i,t).
    """
    found = _BY_NAME[move](list(current), rng)
    if found is None:
        return None
    whole = all(fleet.fits(members) for members, _ in found)
    return design(found) if whole and {phase for _, phase in found} == set(PHASES) else None


def neighbours(
    fleet: Fleet,
    current: Design,
    count: int,
    rng: np.random.Generator,
    *,
    moves: tuple[Move, ...] = MOVES,
    tabu: frozenset[Design] = frozenset(),
    attempts: int = 30,
) -> list[Design]:
    """Up to ``count`` different random neighbours that are not tabu.

    Parameters
    ----------
    attempts
        Draws per wanted neighbour before fewer are returned.
    """
    found: dict[Design, None] = {}
    for _ in range(attempts * count):
        if len(found) == count:
            break
        one = neighbour(fleet, current, moves[int(rng.integers(len(moves)))], rng)
        if one is not None and one != current and one not in tabu:
            found[one] = None
    return list(found)


def _phase(rng: np.random.Generator) -> Phase:
    return PHASES[int(rng.integers(2))]


def _flip(parts: list[Part], rng: np.random.Generator) -> list[Part] | None:
    k = int(rng.integers(len(parts)))
    members, phase = parts[k]
    return [*parts[:k], (members, other(phase)), *parts[k + 1 :]]


def _split(parts: list[Part], rng: np.random.Generator) -> list[Part] | None:
    """A random share r of every type goes to the first new group, rounded down."""
    k = int(rng.integers(len(parts)))
    members, _ = parts[k]
    ratio = rng.random()
    first = group((m, int(n * ratio)) for m, n in members)
    second = group((m, n - int(n * ratio)) for m, n in members)
    if not first or not second:
        return None
    return [*parts[:k], (first, _phase(rng)), (second, _phase(rng)), *parts[k + 1 :]]


def _merge(parts: list[Part], rng: np.random.Generator) -> list[Part] | None:
    drawn = two_of(parts, rng)
    if drawn is None:
        return None
    (one, _), (two, _), rest = drawn
    return [*rest, (merged(one, two), _phase(rng))]


def _move(parts: list[Part], rng: np.random.Generator) -> list[Part] | None:
    """A number of GPUs of one machine goes from a group to another."""
    drawn = two_of(parts, rng)
    if drawn is None:
        return None
    (source, first), (target, second), rest = drawn
    m, n = source[int(rng.integers(len(source)))]
    moved = int(rng.integers(1, n + 1))
    left = without(source, m, moved)
    return [*rest, (left, first), (merged(target, ((m, moved),)), second)] if left else None


_BY_NAME: dict[Move, Callable[[list[Part], np.random.Generator], list[Part] | None]] = {
    "flip": _flip,
    "split": _split,
    "merge": _merge,
    "move": _move,
}
