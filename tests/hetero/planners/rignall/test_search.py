from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from hetero.arrays import Floats
from hetero.errors import DataError, InfeasibleError, ParameterError
from hetero.planners.rignall.assignment import Assignment, IslandGroup, gpus_used
from hetero.planners.rignall.direct import Direct
from hetero.planners.rignall.divider import Divider, divide
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.inner import Deviations, solve
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.planners.rignall.search import Objective, Search, Space, search
from hetero.workload.lengths import LengthRanges

BAYES = all(importlib.util.find_spec(name) for name in ("ax", "numpyro"))
needs_bayes = pytest.mark.skipif(not BAYES, reason="the extra 'bayes' is not installed")
INVENTORY = {"gpu0": 16, "gpu1": 12}


@pytest.fixture(scope="module")
def rates() -> RateTable:
    random = np.random.default_rng(3)
    share = random.dirichlet(np.ones(4))
    edges = np.arange(5) * 100
    ranges = LengthRanges(edges[:-1], edges[1:], edges[:-1] + 50, share)
    classes = tuple(IslandClass(gpu, s) for gpu, n in INVENTORY.items() for s in range(2, n + 1))
    sizes = np.array([c.size for c in classes])[:, None]
    prefill = sizes**0.8 * random.uniform(0.8, 1.2, (len(classes), 4))
    decode = sizes**1.3 * random.uniform(0.8, 1.2, (len(classes), 4)) * (sizes >= 4)
    return RateTable(classes, ranges, prefill, decode)


def test_divider_by_hand() -> None:
    # k^1 over 1..4 is 0.1, 0.2, 0.3, 0.4 of the 12 GPUs beyond the minimum: 1.2, 2.4, 3.6, 4.8.
    assert divide(20, 4, 1.0, 2) == (3, 4, 6, 7)
    assert divide(20, 4, -1.0, 2)[0] > divide(20, 4, -1.0, 2)[-1]
    assert divide(10, 3, 1e-12, 1) == (4, 3, 3)
    assert divide(5, 0, 0.0) == divide(0, 5, 0.0) == divide(1, 5, 0.0, 2) == ()
    assert divide(6, 3, 2.0, 2) == (2, 2, 2)
    for bad in ((-1, 2, 0.0, 1), (4, -2, 0.0, 1), (4, 2, 0.0, 0), (4, 2, float("nan"), 1)):
        with pytest.raises(ParameterError, match="no division"):
            divide(*bad)


@pytest.mark.parametrize("space", [Divider(INVENTORY), Direct(INVENTORY, slots=4)])
def test_every_point_of_a_space_is_a_layout_within_the_inventory(space: Space) -> None:
    random = np.random.default_rng(0)
    points = space.from_unit(random.random((200, len(space.names))))
    for reach in (0.02, 0.3):
        points = np.concatenate([points, space.mutated(points[:100], random, reach)])
    assert np.all(points >= space.lower)
    assert np.all(points <= space.upper)
    whole = points[:, space.integer]
    assert np.array_equal(whole, np.round(whole))
    for columns, total in space.totals:
        assert np.all(points[:, columns].sum(axis=1) <= total)
    for point in points:
        used = gpus_used(space.layout(point))
        assert all(used.get(gpu, 0) <= count for gpu, count in INVENTORY.items())
    assert np.all(points[200:] != points[:100].repeat(2, 0), axis=None) or len(points) == 400


def test_direct_draws_are_uniform_over_what_the_inventory_allows() -> None:
    space = Direct({"gpu0": 3}, slots=2, minimum=1)
    grid = (np.arange(64) + 0.5) / 64
    first, second = np.meshgrid(grid, grid)
    points = space.from_unit(np.stack([first.ravel(), second.ravel()], axis=1))
    found, counts = np.unique(points, axis=0, return_counts=True)
    assert len(found) == 10  # x1 + x2 <= 3
    # Cuts that coincide can be drawn in one order only, the others in two.
    assert counts.max() == 2 * counts.min()


def test_expected_throughput_by_hand() -> None:
    ranges = LengthRanges(
        np.array([0, 100]), np.array([100, 200]), np.array([50, 150]), np.array([0.75, 0.25])
    )
    one, other = IslandClass("gpu0", 2), IslandClass("gpu1", 2)
    table = RateTable((one, other), ranges, [[8.0, 4.0], [9.0, 9.0]], [[9.0, 9.0], [10.0, 20.0]])
    groups = (
        IslandGroup(one, "prefill", 2, np.array([0.5, 0.5])),
        IslandGroup(other, "decode", 1, np.array([0.25, 0.75])),
    )
    plan = Assignment(table, groups, "aggregated", 0.0, 0.0, "optimal")
    # Prefill 0.75 * 8 + 0.25 * 4 = 7, decode 0.75 * 2.5 + 0.25 * 15 = 5.625.
    assert plan.expected_rps == pytest.approx(5.625)
    assert plan.throughput_rps == pytest.approx(12.0)


def test_an_objective_values_layouts_by_its_program(rates: RateTable) -> None:
    layout = {IslandClass("gpu0", 8): 2, IslandClass("gpu1", 4): 3}
    printed = Objective(rates, "aggregated", Deviations(tau=1.0, weight=1.0))
    plan = solve(rates, layout, "aggregated", deviations=Deviations(tau=1.0, weight=1.0))
    assert printed(layout) == pytest.approx(plan.expected_rps, rel=1e-3)
    assert printed.assignment(layout).form == "aggregated"
    assert Objective(rates)(layout) == pytest.approx(solve(rates, layout).served_rps, rel=1e-3)
    assert printed({IslandClass("gpu0", 8): 1}) == 0.0
    # SCIP alone would let a millionth of the second island decode, and both prefill.
    every = LengthRanges(*(np.array([k]) for k in (0, 100, 50)), np.array([1.0]))
    fast = RateTable(rates.classes[:2], every, [[5.0], [5.0]], [[0.0], [2e4]])
    assert Objective(fast, "aggregated")(dict.fromkeys(rates.classes[:2], 1)) == pytest.approx(5.0)
    found = search(Divider(INVENTORY), printed, "random", batch=4, iterations=2)
    assert found.best is not None
    assert found.best.expected_rps == found.values_rps.max() < found.best.throughput_rps


def run(rates: RateTable, method: object, **more: object) -> Search:
    space = more.pop("space", Divider(INVENTORY))
    settings: dict[str, object] = {"batch": 4, "iterations": 3, "seed": 1} | more
    return search(space, Objective(rates), method, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["random", "sobol", "mutation"])
@pytest.mark.parametrize("space", [Divider(INVENTORY), Direct(INVENTORY, slots=3)])
def test_baselines_fill_batches_and_repeat(rates: RateTable, method: str, space: Space) -> None:
    one, two = (run(rates, method, space=space) for _ in "ab")
    assert one.points.shape == (12, len(space.names))
    assert np.array_equal(one.points, two.points)
    assert np.array_equal(one.values_rps, two.values_rps)
    optimum = exact(rates, INVENTORY, minimum=2)
    assert np.all(one.values_rps <= optimum.bound * (1 + 1e-9))
    assert np.all(np.diff(one.trace_rps) >= 0)
    assert one.best is not None
    assert one.best.throughput_rps == pytest.approx(one.values_rps.max())
    assert "best so far" in str(one)


@needs_bayes
@pytest.mark.parametrize("space", [Divider(INVENTORY), Direct(INVENTORY, slots=3)])
def test_ax_fills_every_batch_within_the_inventory(rates: RateTable, space: Space) -> None:
    found = run(rates, "bo", space=space)
    assert found.points.shape == (12, len(space.names))
    assert np.all((space.lower <= found.points) & (found.points <= space.upper))
    whole = found.points[:, space.integer]
    assert np.array_equal(whole, np.round(whole))
    for columns, total in space.totals:
        assert np.all(found.points[:, columns].sum(axis=1) <= total)
    assert found.releases == (f"Ax {version('ax-platform')}",) * 2


@pytest.mark.parametrize("method", ["mutation", "sobol", pytest.param("bo", marks=needs_bayes)])
@pytest.mark.parametrize("after", [1, 2])
def test_a_killed_search_resumes_to_the_same_trials(
    rates: RateTable, tmp_path: Path, method: str, after: int
) -> None:
    whole = run(rates, method)
    file, left = tmp_path / "search.json", iter(range(after - 1))
    with pytest.raises(StopIteration):
        run(rates, method, state=file, progress=lambda _: next(left))
    resumed = run(rates, method, state=file)
    assert np.array_equal(resumed.points, whole.points)
    assert np.array_equal(resumed.values_rps, whole.values_rps)
    assert f"The first {after} batches are those of a search cut off before." in str(resumed)
    assert "cut off" not in str(whole)
    # A finished search is read, a longer one goes on, a shorter one is cut.
    assert np.array_equal(run(rates, method, state=file).points, whole.points)
    assert len(run(rates, method, state=file, iterations=2).values_rps) == 8


@needs_bayes
def test_another_release_of_ax_goes_on_and_is_told(
    rates: RateTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetero.planners.rignall import search_ax

    space, file = Divider({"gpu0": 16}), tmp_path / "search.json"
    begun = run(rates, "bo", state=file, space=space, batch=2, iterations=2)
    monkeypatch.setattr(search_ax, "RELEASE", "Ax 99")
    found = run(rates, "bo", state=file, space=space, batch=2)
    assert np.array_equal(found.points[:4], begun.points)
    assert f"proposed by Ax {version('ax-platform')}, then by Ax 99." in str(found)


def test_a_search_does_not_take_the_file_of_another(rates: RateTable, tmp_path: Path) -> None:
    file = tmp_path / "search.json"
    run(rates, "random", state=file)
    with pytest.raises(DataError, match="search with seed 1, not 2"):
        run(rates, "random", state=file, seed=2)
    with pytest.raises(DataError, match="search with space divider"):
        run(rates, "random", state=file, space=Direct(INVENTORY))
    file.write_text("{}")
    with pytest.raises(DataError, match="holds no search"):
        run(rates, "random", state=file)


@needs_bayes
@pytest.mark.slow
def test_the_sparse_model_proposes_a_full_batch(rates: RateTable) -> None:
    found = run(rates, "saasbo", space=Direct(INVENTORY, slots=2), iterations=2)
    assert found.points.shape == (8, 4)
    assert np.all(found.points[:, :2].sum(axis=1) <= INVENTORY["gpu0"])


def test_errors_name_the_cause(rates: RateTable) -> None:
    with pytest.raises(ParameterError, match="no search method called 'guess'"):
        run(rates, "guess")
    with pytest.raises(ParameterError, match="0 batches"):
        run(rates, "random", iterations=0)
    with pytest.raises(InfeasibleError, match="1 gpu1 GPUs are fewer than the smallest island"):
        Divider({"gpu0": 4, "gpu1": 1})
    with pytest.raises(ParameterError, match="slots is 0"):
        Direct(INVENTORY, slots=0)

    def lazy(
        space: Space, points: Floats, values: Floats, count: int, random: np.random.Generator
    ) -> Floats:
        return points[:1]

    with pytest.raises(ParameterError, match="lazy proposed 1 layouts instead of 4"):
        run(rates, lazy)
