"""The outer loop: layouts proposed in batches, valued by the inner loop, saved after each batch."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import joblib
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

Method: TypeAlias = Literal["bo", "saasbo", "sobol", "random", "mutation"]

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
        if (key := _key(layout)) not in self._known:
            try:
                found = self.assignment(layout)
                flow = self.form.startswith("flow")
                self._known[key] = found.throughput_rps if flow else found.expected_rps
            except InfeasibleError:
                self._known[key] = 0.0
            self.solved += 1
        return self._known[key]

    @property
    def digest(self) -> str:
        """What tells objectives apart: other lengths give the same space other values."""
        text = f"{self.form} {self.deviations} {self.rates.classes}".encode()
        for array in (self.rates.share, self.rates.prefill_rps, self.rates.decode_rps):
            text += array.tobytes()
        return hashlib.sha256(text).hexdigest()[:12]

    def remember(self, space: Space, points: Floats, values_rps: Floats) -> None:
        """Take over what another search, or this one before it was cut off, has solved."""
        found = zip((_key(space.layout(point)) for point in points), values_rps, strict=True)
        self._known |= {key: float(value) for key, value in found}

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
        if not self.form.startswith("flow"):  # then SCIP takes a third of the time, but for it
            found = inner.solve(self.rates, layout, self.form, solver="gscip", **how)
            if found.expected_rps > 10 * inner.LEAST_RPS:  # a millionth of an island may serve
                return found
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
    releases
        Of what proposed each batch but the first, if that is Ax; a file may hold several.
    resumed
        Batches that were read from the file of a search that was cut off.
    """

    space: Space
    method: str
    batch: int
    seed: int
    points: Floats
    values_rps: Floats
    best: Assignment | None
    releases: tuple[str, ...] = ()
    resumed: int = 0

    @property
    def told(self) -> tuple[str, ...]:
        """A sentence each if the search was cut off, and if releases of Ax took turns in it."""
        found = []
        if self.resumed:
            found.append(f"The first {self.resumed} batches are those of a search cut off before.")
        if len(several := dict.fromkeys(self.releases)) > 1:
            found.append(f"Batches were proposed by {', then by '.join(several)}.")
        return tuple(found)

    @property
    def trace_rps(self) -> Floats:
        """Best throughput after each batch, shape (batches,) [requests/s]."""
        return np.asarray(np.maximum.accumulate(self.values_rps)[self.batch - 1 :: self.batch])

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
        return Table.of(
            f"Search by {self.method}, seed {self.seed}",
            columns,
            range(len(best)),
            self.space.kind,
            *self.told,
        )


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
        ``bo``: Ax on a Gaussian process (BoTorch's SingleTaskGP); ``saasbo``: Ax on the fully
        Bayesian model with sparse axis-aligned subspaces (SaasFullyBayesianSingleTaskGP);
        ``sobol``, ``random`` and ``mutation``: baselines. Or a function.
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
    name, release, propose = _proposer(method)
    identity = {"space": space.kind, "method": name, "batch": batch, "seed": seed}
    file = None if state is None else Path(state)
    points, values, releases = _load(file, identity, len(space.names))
    objective.remember(space, points, values)
    resumed = len(values) // batch if len(values) < batch * iterations else 0
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
        releases = (*releases, release) if k and release else releases
        if file is not None:
            _save(file, identity, points, values, releases)
        if progress is not None:
            progress(batch)
    total = batch * iterations
    points, values = points[:total], values[:total]
    winner = int(np.argmax(values))
    best = objective.assignment(space.layout(points[winner])) if values[winner] > 0 else None
    told = releases[: iterations - 1]
    return Search(space, name, batch, seed, points, values, best, told, resumed)


@dataclass(frozen=True, slots=True)
class Trials:
    """Searches of a space, one per seed, in processes.

    What one solves, all later searches for the same objective know.

    Attributes
    ----------
    folder
        Folder of a file per search, which is saved to it after each batch and resumed from it.
    jobs
        Processes, by default as joblib's context says.
    """

    seeds: Sequence[int]
    folder: Path | None = None
    jobs: int | None = None

    def __call__(
        self, space: Space, objective: Objective, method: Method, batch: int, iterations: int
    ) -> list[Search]:
        """One search per seed with ``iterations`` batches, the first one random."""
        calls = []
        for seed in self.seeds:
            text = f"{space.kind} {method} {batch} {seed} {objective.digest}"
            name = "".join(c if c.isalnum() else "-" for c in text)
            file = None if self.folder is None else self.folder / f"{name}.json"
            how = {"batch": batch, "iterations": iterations, "seed": seed, "state": file}
            calls.append(joblib.delayed(search)(space, objective, method, **how))
        # One after the other where there is one, or where all take the same sequence.
        jobs = 1 if len(calls) == 1 or method == "sobol" else self.jobs
        found = list(joblib.Parallel(n_jobs=jobs)(calls))
        for each in found:
            objective.remember(space, each.points, each.values_rps)
        return found


def _key(layout: Layout) -> tuple[tuple[IslandClass, int], ...]:
    return tuple(sorted(layout.items()))


def _proposer(method: Method | Proposer) -> tuple[str, str, Proposer]:
    """Name, release and function of what proposes layouts."""
    if callable(method):
        return getattr(method, "__name__", "own method"), "", method
    require(
        method in get_args(Method),
        f"There is no search method called '{method}'.",
        resolve=f"use one of {', '.join(get_args(Method))}.",
    )
    if method in ("sobol", "random", "mutation"):
        return method, "", PROPOSERS[method]
    try:
        from hetero.planners.rignall import search_ax
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"Method '{method}' needs {error.name or 'a package'}, which is not installed.",
            resolve="install the extra: pip install 'hetero[bayes]', or use mutation.",
        ) from error
    return method, search_ax.RELEASE, search_ax.PROPOSERS[method]


def _load(
    file: Path | None, identity: dict[str, Any], dimensions: int
) -> tuple[Floats, Floats, tuple[str, ...]]:
    if file is None or not file.exists():
        return np.zeros((0, dimensions)), np.zeros(0), ()
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        found = {key: kept[key] for key in identity}
        points = np.array(kept["points"], np.float64)
        values = np.array(kept["values_rps"], np.float64)
        releases = tuple(map(str, kept["releases"]))
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
    return points[:whole], values[:whole], releases


def _save(
    file: Path,
    identity: dict[str, Any],
    points: Floats,
    values: Floats,
    releases: tuple[str, ...],
) -> None:
    # Full digits, so that a resumed search sees the numbers that an uninterrupted one does.
    trials = {"points": points.tolist(), "values_rps": values.tolist(), "releases": releases}
    text = json.dumps(identity | trials)
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
    known = {_key(layout) for layout in tried}
    rows: list[int] = []
    for k, point in enumerate(points):
        key = _key(space.layout(point))
        if key not in known:
            known.add(key)
            rows.append(k)
    return rows


PARENTS = 6  # layouts that survive in the mutation search
_TRIES = 20  # rounds of draws before a batch is filled with layouts tried before


def random(
    space: Space, points: Floats, values: Floats, count: int, generator: np.random.Generator
) -> Floats:
    """Layouts drawn uniformly."""
    return space.from_unit(generator.random((count, len(space.names))))


def sobol(
    space: Space, points: Floats, values: Floats, count: int, generator: np.random.Generator
) -> Floats:
    """The next points of one Sobol sequence, the same for every seed."""
    from scipy.stats import qmc  # takes a second

    sequence = qmc.Sobol(len(space.names), scramble=False)
    sequence.fast_forward(len(points))
    return space.from_unit(sequence.random(count))


def mutation(
    space: Space, points: Floats, values: Floats, count: int, generator: np.random.Generator
) -> Floats:
    """Mutations of the best layouts so far, none of them tried before."""
    best = np.argsort(-values, kind="stable")[:PARENTS]
    tried = [space.layout(point) for point in points]
    found: list[Floats] = []
    for _ in range(_TRIES):
        parents = points[generator.choice(best, size=count)]
        reach = float(generator.choice([0.05, 0.15, 0.4]))
        new = space.mutated(parents, generator, reach)
        for row in fresh(space, tried, new)[: count - len(found)]:
            found.append(new[row])
            tried.append(space.layout(new[row]))
        if len(found) == count:
            return np.array(found)
    rest = space.from_unit(generator.random((count - len(found), len(space.names))))
    return np.array([*found, *rest])


PROPOSERS: dict[str, Proposer] = {"random": random, "sobol": sobol, "mutation": mutation}
