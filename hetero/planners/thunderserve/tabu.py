"""Tabu search over groups and phases (ThunderServe, Algorithm 1), seeded and resumable.

Neighbours of a design come by flip, split, merge or move of groups (ThunderServe, section 3.2).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

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
from hetero.errors import DataError, InfeasibleError, require_not_negative, require_positive
from hetero.files import writing
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.streams import stream

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TabuSettings:
    """Parameters of the search; the defaults are the paper's.

    Attributes
    ----------
    steps, neighbours, memory
        N_step, N_nghb and N_mem.
    moves
        Moves that make neighbours; ``("flip",)`` alone is light rescheduling.
    patience
        Steps without a better design after which the search restarts from the best one found,
        with an empty memory; never by default, as in the paper.
    stall
        Steps without a better design after which it ends; never by default.
    """

    steps: int = 100
    neighbours: int = 10
    memory: int = 5
    moves: tuple[Move, ...] = MOVES
    patience: int | None = None
    stall: int | None = None

    def __post_init__(self) -> None:
        require_not_negative(steps=self.steps, memory=self.memory)
        require_positive(neighbours=self.neighbours, moves=len(self.moves))


@dataclass(frozen=True, slots=True)
class TabuStep:
    """One step of a search: best value so far, value of the step, designs evaluated so far."""

    best: float
    current: float
    evaluated: int


@dataclass(slots=True)
class TabuSearch:
    """A search that can stop after any step, be saved, and go on as if it had not stopped.

    Source: ThunderServe, Algorithm 1: tabu search over groups and phases; N_step, N_nghb, N_mem.

    Attributes
    ----------
    current, best, tabu
        Where it is, the best design found, and the latest designs it may not return to.
    history
        One entry before the first step, and one per step.
    """

    evaluator: Evaluator
    settings: TabuSettings
    rng: np.random.Generator
    current: Design
    best: Design
    tabu: list[Design] = field(default_factory=list)
    history: list[TabuStep] = field(default_factory=list)
    improved: int = 0  # the step that found the best design
    restarted: int = 0  # the latest step that started again from it

    @classmethod
    def start(
        cls,
        evaluator: Evaluator,
        settings: TabuSettings | None = None,
        *,
        seed: int = 0,
        start: Design | None = None,
    ) -> TabuSearch:
        """A search that has done no step.

        Parameters
        ----------
        start
            First design; by default clusters of the bandwidth matrix with random phases.

        Raises
        ------
        InfeasibleError
            If the fleet cannot hold two copies of the model, one for each phase.
        """
        rng = stream(seed, "tabu")
        if start is None:
            start = evaluator.fleet.clusters(rng)
        if len(start) < 2:
            fleet = evaluator.fleet
            usable = sum(n * b for n, b in zip(fleet.inventory, fleet.gpu_bytes, strict=True))
            raise InfeasibleError(
                f"{evaluator.model.cluster.name} offers {usable / 2**30:,.0f} GiB, which do not "
                f"hold two copies of {evaluator.model.llm.name} "
                f"({fleet.needed_bytes / 2**30:,.0f} GiB each): one for each phase.",
                resolve="add GPUs, or use a smaller model or precision.",
            )
        search = cls(evaluator, settings or TabuSettings(), rng, start, start)
        value = evaluator.value(start).score
        search.history.append(TabuStep(value, value, evaluator.evaluated))
        return search

    @property
    def done(self) -> bool:
        """Whether all steps are done, or nothing better has been found for long enough."""
        taken, stall = len(self.history) - 1, self.settings.stall
        return taken >= self.settings.steps or (
            stall is not None and taken - self.improved >= stall
        )

    def step(self, jobs: int = 1) -> None:
        """One step: the best of the neighbours that are not tabu, even if it is worse."""
        settings, taken = self.settings, len(self.history)
        patience = settings.patience
        if patience is not None and taken - max(self.improved, self.restarted) > patience:
            self.current, self.tabu, self.restarted = self.best, [], taken
        options = neighbours(
            self.evaluator.fleet,
            self.current,
            settings.neighbours,
            self.rng,
            moves=settings.moves,
            tabu=frozenset(self.tabu),
        )
        if options:
            values = [value.score for value in self.evaluator.values(options, jobs)]
            k = int(np.argmax(values))
            self.current = options[k]
            if values[k] > self.history[-1].best:
                self.best, self.improved = self.current, taken
            self.tabu = [*self.tabu, self.current][-settings.memory :] if settings.memory else []
        best = self.evaluator.value(self.best).score
        current = self.evaluator.value(self.current).score
        self.history.append(TabuStep(best, current, self.evaluator.evaluated))

    def run(self, *, jobs: int = 1, progress: Callable[[TabuStep], None] | None = None) -> Design:
        """All steps that are left; returns the best design."""
        while not self.done:
            self.step(jobs)
            if progress:
                progress(self.history[-1])
        return self.best

    # Saving ---------------------------------------------------------------------------------

    def save(self, path: Path | str) -> Path:
        """Write the state of the search; values are computed again when it is resumed."""
        file = Path(path)
        state = {
            "cluster": self.evaluator.model.cluster.name,
            "model": self.evaluator.model.llm.name,
            "settings": {name: getattr(self.settings, name) for name in self.settings.__slots__},
            "rng": self.rng.bit_generator.state,
            "current": self.current,
            "best": self.best,
            "tabu": self.tabu,
            "history": [(one.best, one.current, one.evaluated) for one in self.history],
            "improved": self.improved,
            "restarted": self.restarted,
        }
        with writing(file, force=True) as part:
            part.write_text(json.dumps(state, indent=1, default=_plain) + "\n", encoding="utf-8")
        return file

    @classmethod
    def resume(
        cls, path: Path | str, evaluator: Evaluator, *, steps: int | None = None
    ) -> TabuSearch:
        """A saved search; ``steps`` in place of its own number lets it go on for longer.

        Raises
        ------
        DataError
            If the file is no saved search of this cluster and model.
        """
        file = Path(path)
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            where = (state["cluster"], state["model"])
            settings = dict(state["settings"])
            settings["moves"] = tuple(settings["moves"])
            found = cls(
                evaluator,
                TabuSettings(**settings),
                stream(0, "tabu"),
                _design(state["current"]),
                _design(state["best"]),
                [_design(one) for one in state["tabu"]],
                [TabuStep(*one) for one in state["history"]],
                state["improved"],
                state["restarted"],
            )
            found.rng.bit_generator.state = state["rng"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"It is no saved search: {error}.", path=file, resolve="save one, or start anew."
            ) from error
        if where != (evaluator.model.cluster.name, evaluator.model.llm.name):
            raise DataError(
                f"It is a search for {where[1]} on {where[0]}.",
                path=file,
                resolve=f"resume it with that model and cluster, or start anew for "
                f"{evaluator.model.llm.name} on {evaluator.model.cluster.name}.",
            )
        if steps is not None:
            found.settings = replace(found.settings, steps=steps)
        return found


def _design(parts: Sequence[Sequence[Any]]) -> Design:
    return design((group((m, n) for m, n in members), phase) for members, phase in parts)


def _plain(value: object) -> object:
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value)} in the state of a search")
