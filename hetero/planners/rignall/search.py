"""The outer loop: layouts proposed in batches, valued by the inner loop, saved after each batch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np

from hetero.arrays import Flags, Floats
from hetero.display import Column, Shown, Table
from hetero.errors import DataError, InfeasibleError, ParameterError, require
from hetero.files import writing
from hetero.planners.rignall import inner
from hetero.planners.rignall.assignment import Assignment, Layout
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.programs import SolverLimits
from hetero.streams import stream

Method: TypeAlias = Literal["bo", "saasbo", "ax", "sobol", "random", "mutation"]

_GAP = 5e-4  # of the inner program, a fraction of what good layouts differ by


class Space(Protocol):
    """What a search space offers; :class:`~hetero.planners.rignall.divider.Divider` is one."""

    @property
    def kind(self) -> str:
        """Text that tells this space from others."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""

    @property
    def integer(self) -> Flags:
        """Which parameters are whole numbers."""

    @property
    def lower(self) -> Floats:
        """Smallest values."""

    @property
    def upper(self) -> Floats:
        """Largest values."""

    @property
    def totals(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Parameters whose sum is bounded, and the bound."""

    def layout(self, point: Floats | list[float]) -> Layout:
        """The islands of a point."""

    def from_unit(self, unit: Floats) -> Floats:
        """Points of numbers in [0, 1)."""

    def mutated(self, points: Floats, random: np.random.Generator, reach: float) -> Floats:
        """Each point changed a little."""


Proposer: TypeAlias = Callable[[Space, Floats, Floats, int, np.random.Generator], Floats]
"""New points from the points tried, their values, how many, and random numbers."""


@dataclass(slots=True)
class Objective:
    """Throughput of a layout by the inner loop; equal layouts are solved once.

    Attributes
    ----------
    rates
        Rates of every class that layouts may have.
    form
        Program of the inner loop. A flow form values a layout by the load of the given mix that it
        carries, the others, which the thesis prints, by their ``expected_rps``.
    deviations
        tau and M of the printed program.
    solved
        Number of inner programs solved so far.
    """

    rates: RateTable
    form: inner.Form = "flow aggregated"
    deviations: inner.Deviations = field(default_factory=inner.Deviations)
    solved: int = 0
    _known: dict[tuple[tuple[IslandClass, int], ...], float] = field(default_factory=dict)

    def __call__(self, layout: Layout) -> float:
        """Throughput R_total [requests/s]; 0 where the layout cannot serve the workload."""
        key = tuple(sorted(layout.items()))
        if key not in self._known:
            try:
                found = self.assignment(layout)
                flow = self.form.startswith("flow")
                self._known[key] = found.throughput_rps if flow else found.expected_rps
            except InfeasibleError:
                self._known[key] = 0.0
            self.solved += 1
        return self._known[key]

    def assignment(self, layout: Layout) -> Assignment:
        """What the inner loop makes of a layout.

        Raises
        ------
        InfeasibleError
            If the layout cannot serve the workload.
        """
        if not layout:
            raise InfeasibleError("The layout has no island.", resolve="give at least two islands.")
        how: dict[str, Any] = {"deviations": self.deviations, "limits": SolverLimits(gap=_GAP)}
        return inner.solve(self.rates, layout, self.form, **how)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Search(Shown):
    """Every layout that a search tried, and the best of them.

    Attributes
    ----------
    space
        The search space.
    method, batch, seed
        How layouts were proposed, how many at a time, and from which seed.
    points
        Shape (trials, parameters), in the order tried.
    values_rps
        Shape (trials,); throughput of each, 0 where it cannot serve the workload.
    best
        What the best layout serves; None if no layout can serve the workload.
    """

    space: Space
    method: str
    batch: int
    seed: int
    points: Floats
    values_rps: Floats
    best: Assignment | None

    @property
    def trace_rps(self) -> Floats:
        """Best throughput after each batch, shape (batches,) [requests/s]."""
        return np.asarray(np.maximum.accumulate(self.values_rps)[self.batch - 1 :: self.batch])

    def trials(self) -> Table:
        """One row per trial."""
        rows = tuple(
            (k // self.batch, k, *(float(v) for v in point), float(value))
            for k, (point, value) in enumerate(zip(self.points, self.values_rps, strict=True))
        )
        columns = (
            Column("batch"),
            Column("trial"),
            *(Column(name) for name in self.space.names),
            Column("throughput", "requests/s", 10),
        )
        return Table(f"Trials of {self.method} on {self.space.kind}", columns, rows)

    def table(self) -> Table:
        """One row per batch: its best layout and the best so far."""
        values = self.values_rps.reshape(-1, self.batch)
        best = self.trace_rps
        columns = (
            Column("batch", of=int),
            Column("layouts", of=lambda k: self.batch),
            Column("best of batch", "requests/s", of=lambda k: float(values[k].max())),
            Column("best so far", "requests/s", of=lambda k: float(best[k])),
            Column("cannot serve", of=lambda k: int((values[k] <= 0).sum())),
        )
        title = f"Search by {self.method}, seed {self.seed}"
        return Table.of(title, columns, range(len(best)), self.space.kind)


def search(
    space: Space,
    objective: Objective,
    method: Method | Proposer = "bo",
    *,
    batch: int = 16,
    iterations: int = 15,
    seed: int = 0,
    state: Path | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Search:
    """Search for a good layout with a fixed budget of batch x iterations layouts.

    The first batch is drawn at random, the warm start; each later one is proposed by the method
    from all trials so far. Every batch is full.

    Parameters
    ----------
    method
        ``bo``: Gaussian process (BoTorch's SingleTaskGP); ``saasbo``: the fully Bayesian model
        with sparse axis-aligned subspaces (BoTorch's SaasFullyBayesianSingleTaskGP); ``ax``: Ax
        as it comes; ``sobol``, ``random`` and ``mutation``: baselines. Or a function.
    state
        File to save trials to after each batch. If it exists, the search goes on from there and
        ends with the trials of an uninterrupted one: a batch depends on the trials before it,
        the seed and its number, on nothing else.
    progress
        Called with the number of layouts after each batch.

    Raises
    ------
    DataError
        If ``state`` belongs to another search.

    Notes
    -----
    Source: Rignall, section 4.9: outer loop, the search of layouts; rho_max.
    The thesis minimises 1 / R; here R is maximised, which orders layouts the same way and stays
    finite where a layout cannot serve the workload.
    """
    require(
        batch >= 1 and iterations >= 1,
        f"{iterations} batches of {batch} layouts are no search.",
        resolve="give 1 or more.",
    )
    name, propose = _proposer(method)
    identity = {"space": space.kind, "method": name, "batch": batch, "seed": seed}
    file = None if state is None else Path(state)
    points, values = _load(file, identity, len(space.names))
    for k in range(len(values) // batch, iterations):
        random = stream(seed, f"batch {k}")
        if k == 0:
            new = space.from_unit(random.random((batch, len(space.names))))
        else:
            new = propose(space, points, values, batch, random)
        require(
            len(new) == batch,
            f"{name} proposed {len(new)} layouts instead of {batch}.",
            resolve="return as many points as were asked for.",
        )
        points = np.concatenate([points, new])
        values = np.concatenate([values, [objective(space.layout(point)) for point in new]])
        if file is not None:
            _save(file, identity, points, values)
        if progress is not None:
            progress(batch)
    total = batch * iterations
    points, values = points[:total], values[:total]
    winner = int(np.argmax(values))
    best = objective.assignment(space.layout(points[winner])) if values[winner] > 0 else None
    return Search(space, name, batch, seed, points, values, best)


def _proposer(method: Method | Proposer) -> tuple[str, Proposer]:
    if callable(method):
        return getattr(method, "__name__", "own method"), method
    require(
        method in get_args(Method),
        f"There is no search method called '{method}'.",
        resolve=f"use one of {', '.join(get_args(Method))}.",
    )
    if method in ("sobol", "random", "mutation"):
        from hetero.planners.rignall import baselines

        return method, baselines.PROPOSERS[method]
    try:
        if method == "ax":
            from hetero.planners.rignall import search_ax

            return method, search_ax.propose
        from hetero.planners.rignall import search_bayes

        return method, search_bayes.PROPOSERS[method]
    except ModuleNotFoundError as error:
        extra = "ax" if method == "ax" else "bayes"
        raise ParameterError(
            f"Method '{method}' needs {error.name or 'a package'}, which is not installed.",
            resolve=f"install the extra: pip install 'hetero[{extra}]', or use mutation.",
        ) from error


def _load(file: Path | None, identity: dict[str, Any], dimensions: int) -> tuple[Floats, Floats]:
    if file is None or not file.exists():
        return np.zeros((0, dimensions)), np.zeros(0)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        found = {key: kept[key] for key in identity}
        points = np.array(kept["points"], np.float64)
        values = np.array(kept["values_rps"], np.float64)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The file holds no search: {error}.",
            path=file,
            resolve="delete it, or name another file.",
        ) from error
    for key, wanted in identity.items():
        if found[key] != wanted:
            raise DataError(
                f"The file belongs to a search with {key} {found[key]}, not {wanted}.",
                path=file,
                resolve="delete it, name another file, or search as it did.",
            )
    points = points.reshape(-1, dimensions)
    whole = len(values) // int(identity["batch"]) * int(identity["batch"])
    return points[:whole], values[:whole]


def _save(file: Path, identity: dict[str, Any], points: Floats, values: Floats) -> None:
    # Full digits, so that a resumed search sees the numbers that an uninterrupted one does.
    text = json.dumps(identity | {"points": points.tolist(), "values_rps": values.tolist()})
    with writing(file, force=True) as part:
        part.write_text(text + "\n", encoding="utf-8")


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """One thread and one seed of torch, so that bytes do not depend on the machine's cores."""
    import torch

    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.random.set_rng_state(state)


def fresh(space: Space, tried: Sequence[Layout], points: Floats) -> list[int]:
    """Rows of points whose layouts differ from those tried and from each other."""
    known = {tuple(sorted(layout.items())) for layout in tried}
    rows: list[int] = []
    for k, point in enumerate(points):
        key = tuple(sorted(space.layout(point).items()))
        if key not in known:
            known.add(key)
            rows.append(k)
    return rows
