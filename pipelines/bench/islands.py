"""Times of the island planners: inner program, exact layout, and searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from hetero import workload
from hetero.arrays import Floats
from hetero.planners.rignall import inner
from hetero.planners.rignall.direct import Direct
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.rates import RateTable
from hetero.planners.rignall.search import Method, Objective, Proposer, Space, search
from hetero.streams import stream
from hetero.timings import Timing
from hetero.workload.synthetic import TruncatedNormal
from pipelines.bench.measured import Say, Times, silent, stopwatch
from pipelines.studies.island_outer_loop import GPUS, INVENTORIES, held

#: Inventory of Rignall's section 5.3.
SEARCHED = {"B300": 128, "H200": 256}
MANY = ("B300", "B200", "H200", "H800", "H20", "H20-3E", "MI300X", "MI308X")
BATCHES = (4, 8, 16)
SKEWS = (1.0, 5.0)
Add: TypeAlias = Callable[[str, str, str, Sequence[float]], None]


def rates_of(
    trace: str, gpus: Sequence[str], sizes: Sequence[int], *, width_tokens: int = 400
) -> RateTable:
    """Rates of DeepSeek-V3 on a public trace's twin, in ranges of ``width_tokens``."""
    model = IslandModel.of_trace(workload.load(trace), width_tokens)
    return model.rates([(gpu, size) for gpu in gpus for size in sizes])


def bench(
    *,
    repeats: int = 5,
    iterations: int = 4,
    ax: bool = False,
    progress: Say = silent,
) -> Times:
    """Measure the island planners on this machine.

    Parameters
    ----------
    repeats
        Layouts of which the median counts.
    iterations
        Batches of the searches; the first is the warm start.
    ax
        Whether to time Ax as well, which takes a minute or more.
    """
    rows: list[tuple[tuple[object, ...], Timing]] = []

    def add(what: str, of: str, key: str, spent: Sequence[float]) -> None:
        measured = Timing.here(
            f"islands.{key}",
            float(np.median(spent)),
            command="hetero bench islands --record",
            statistic="median" if len(spent) > 1 else "single",
            repeats=len(spent),
        )
        rows.append(((what, of), measured))

    progress("inner program")
    of = "64 islands, 6 classes, 40 ranges"
    add("inner program, aggregated", of, "inner.64x40", _inner(max(repeats, 9)))
    for trace in ("azure2023_code", "azure2023_conv"):
        rates = rates_of(trace, GPUS, range(2, 129))
        for letter, counts in INVENTORIES.items():
            progress(f"exact layout ({letter}), {trace}")
            spent: list[float] = []
            for _ in range(min(repeats, 3)):
                with stopwatch(spent):
                    load = exact(rates, held(rates, counts)).served_rps
            of = f"({letter}), {trace.removeprefix('azure2023_')}: {load:.4g} requests/s"
            add("exact layout", of, f"exact.{letter}.{trace.removeprefix('azure2023_')}", spent)
    progress("exact layout, 2,000 GPUs")
    many = rates_of("azure2023_conv", MANY, [2**k for k in range(1, 8)])
    spent = []
    with stopwatch(spent):
        proven = exact(many, held(many, [250] * len(MANY)))
    add("exact layout", f"2,000 GPUs of 8 types: gap {proven.gap:.1e}", "exact.2000", spent)
    _searches(iterations, ax, progress, add)
    note = "CPU time of the process, in which solvers run on one core."
    return Times("Island planners", ("what", "of"), tuple(rows), note)


def _inner(repeats: int) -> list[float]:
    """Time of the aggregated program on random splits of 64 islands over six classes."""
    model = IslandModel.of(
        TruncatedNormal(500, 2000, 0, 7999),
        200,
        limit_tokens=8000,
        output_tokens=100,
        max_output_tokens=1000,
    )
    rates = model.rates([(gpu, size) for gpu in GPUS for size in (16, 32)])
    random = stream(0, "bench islands")
    spent: list[float] = []
    for _ in range(repeats):
        counts = random.multinomial(64 - 12, np.full(6, 1 / 6)) + 2
        layout = dict(zip(rates.classes, (int(n) for n in counts), strict=True))
        with stopwatch(spent):
            inner.solve(rates, layout)
    return spent


def _searches(iterations: int, ax: bool, say: Say, add: Add) -> None:
    """Times of whole searches, and of proposing a batch in six dimensions."""
    from hetero.planners.rignall import search_bayes

    two = rates_of("azure2023_code", tuple(SEARCHED), range(2, 257))
    inventory = held(two, tuple(SEARCHED.values()))

    def whole(what: str, key: str, space: Space, method: Method, batch: int) -> None:
        say(f"{what}, batch {batch}")
        objective = Objective(two)
        spent: list[float] = []
        with stopwatch(spent):
            search(space, objective, method, batch=batch, iterations=iterations)
        add(what, f"batch {batch}, {iterations} iterations", key, spent)

    # The first search imports and compiles what the later ones have at hand.
    search(Divider(inventory), Objective(two), "bo", batch=4, iterations=2)
    for batch in BATCHES:
        whole("divider, Gaussian process", f"divider.batch{batch}", Divider(inventory), "bo", batch)
    for skew in SKEWS:
        space = Divider(inventory, skew=skew)
        whole(f"divider, skew to {skew:g}", f"divider.skew{skew:g}", space, "bo", 8)
    methods: tuple[Method, Method] = ("bo", "saasbo")
    for method in methods:
        for batch in (BATCHES[0], BATCHES[-1]):
            key = f"direct.{method}.batch{batch}"
            whole(f"direct, 16 slots, {method}", key, Direct(inventory), method, batch)
    three = rates_of("azure2023_code", GPUS, range(2, 129))
    proposers = {"bo": search_bayes.PROPOSERS["bo"]}
    if ax:
        from hetero.planners.rignall import search_ax

        proposers["ax"] = search_ax.propose
    for name, proposer in proposers.items():
        say(f"proposing batches of 16, {name}")
        space = Divider(held(three, INVENTORIES["a"]))
        spent = _proposing(space, Objective(three), proposer)
        add(f"proposing a batch, {name}", "16 layouts, 6 dimensions", f"propose.{name}", spent)


def _proposing(space: Space, objective: Objective, proposer: Proposer) -> list[float]:
    """Time to propose each batch after the warm start; layouts are valued outside of it."""
    spent: list[float] = []

    def timed(
        space: Space, points: Floats, values: Floats, count: int, random: np.random.Generator
    ) -> Floats:
        with stopwatch(spent):
            found = proposer(space, points, values, count, random)
        return found  # noqa: RET504 - to mypy a block may swallow what it raises

    search(space, objective, timed, batch=16, iterations=5)
    return spent
