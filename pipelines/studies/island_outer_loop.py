"""Searches for layouts of islands beside the proven optimum (Rignall, chapters 5.3 and 5.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hetero.planners.rignall import inner
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.rates import RateTable
from hetero.planners.rignall.search import Method, Objective, Search, Space, search
from hetero.plots import figures
from hetero.programs import SolverLimits

#: Inventories of Rignall's Table 5.1, 512 $/h each, and what the thesis prints for them.
GPUS: Final = ("H200", "H800", "H20")
INVENTORIES: Final = {"a": (64, 64, 128), "b": (32, 128, 128), "c": (128, 0, 0)}
PUBLISHED: Final = {"code": (176, 199, 139), "conv": (138, 126, 114)}
PUBLISHED_D: Final = {"code": (18, 22, 25), "conv": (5, 45.5, 7)}
READ: Final = ("thesis", "fitting")


def tabulated(model: IslandModel, gpus: Sequence[str], most: int) -> Objective:
    """Layouts of these types valued by the rates of every size from 2 to ``most`` GPUs."""
    return Objective(model.rates([(gpu, size) for gpu in gpus for size in range(2, most + 1)]))


def held(rates: RateTable, counts: Sequence[int]) -> dict[str, int]:
    """Inventory of the table's GPU types, those without a GPU left out."""
    return {gpu: n for gpu, n in zip(rates.gpus, counts, strict=True) if n}


@dataclass(frozen=True)
class Trials:
    """Searches of a space, one per seed, saved to ``folder`` and resumed from it if given."""

    seeds: Sequence[int]
    folder: Path | None = None

    def __call__(
        self, space: Space, objective: Objective, method: Method, batch: int, iterations: int
    ) -> list[Search]:
        """One search per seed with ``iterations`` batches, the first one random."""
        searches = []
        for seed in self.seeds:
            text = f"{space.kind} {method} {batch} {seed} {objective.rates.reading}"
            name = "".join(c if c.isalnum() else "-" for c in text)
            file = None if self.folder is None else self.folder / f"{name}.json"
            budget: dict[str, Any] = {"batch": batch, "iterations": iterations}
            searches.append(search(space, objective, method, **budget, seed=seed, state=file))
        return searches


def ends(searches: Sequence[Search]) -> NDArray[np.float64]:
    """Best throughput of each trial [requests/s]."""
    return np.array([each.trace_rps[-1] for each in searches])


def spread(values: NDArray[np.float64]) -> float:
    """Standard deviation over trials; 0 of a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def extent(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Smallest and largest of several trials."""
    return (float(values.min()), float(values.max())) if len(values) > 1 else None


def claim(number: int | str, value: float, figure: str, note: str, **more: Any) -> dict[str, Any]:
    """What :meth:`ResultFolder.claim` takes for one of the thesis' claims."""
    return {"claim": f"rignall-{number}", "value": value, "figure": figure, "note": note} | more


@dataclass(frozen=True)
class Fleets:
    """Rignall's Table 5.1: mixed and uniform fleets of the same price, by trace and inventory.

    Attributes
    ----------
    optimum
        By trace, reading and inventory: the best of all layouts.
    searches, printed
        Trials of the divider under the reading *thesis*, and the printed program (4.8.1) at the
        best layout of each.
    """

    optimum: dict[tuple[str, str, str], Assignment]
    searches: dict[tuple[str, str], list[Search]]
    printed: dict[tuple[str, str], list[Assignment]]

    @classmethod
    def of(
        cls,
        models: Mapping[tuple[str, str], IslandModel],
        trials: Trials,
        batch: int,
        iterations: int,
    ) -> Fleets:
        """Search and solve every inventory for the model of each trace and reading."""
        fleets = cls({}, {}, {})
        limits = SolverLimits(gap=1e-4, nodes=200)
        for (trace, reading), model in models.items():
            objective = tabulated(model, GPUS, 128)
            rates = objective.rates
            for letter, counts in INVENTORIES.items():
                inventory = held(rates, counts)
                fleets.optimum[trace, reading, letter] = exact(rates, inventory, minimum=2)
                if reading == "thesis":
                    tried = trials(Divider(inventory), objective, "bo", batch, iterations)
                    fleets.searches[trace, letter] = tried
                    fleets.printed[trace, letter] = [
                        inner.solve(rates, each.best.layout, "aggregated", limits=limits)
                        for each in tried
                        if each.best is not None
                    ]
        return fleets

    @property
    def traces(self) -> list[str]:
        """Their names, in order."""
        return list(dict.fromkeys(trace for trace, _ in self.searches))

    def best_rps(self, trace: str, letter: str) -> NDArray[np.float64]:
        """Best throughput of each trial."""
        return ends(self.searches[trace, letter])

    def deviation_rps(self, trace: str, letter: str) -> NDArray[np.float64]:
        """D_total of the printed program at the best layout of each trial."""
        return np.array([each.deviation_rps for each in self.printed[trace, letter]])

    def unfinished(self, trace: str, letter: str) -> int:
        """Printed programs that stopped before their optimum was proven."""
        return sum(each.status == "limit" for each in self.printed[trace, letter])

    def table(self) -> pd.DataFrame:
        """Rignall's Table 5.1 with the optimum, and beside the searches what the thesis prints."""
        rows = []
        for (trace, reading, letter), proven in self.optimum.items():
            row: dict[str, object] = {
                "trace": trace,
                "reading": reading,
                "inventory": letter,
                "optimum [req/s]": proven.served_rps,
                "bound [req/s]": proven.bound,
            }
            if reading == "thesis":
                best, k = self.best_rps(trace, letter), list(INVENTORIES).index(letter)
                row |= {
                    "search [req/s]": best.mean(),
                    "std [req/s]": spread(best),
                    "regret [%]": 100 * (1 - best.mean() / proven.served_rps),
                    "published [req/s]": PUBLISHED[trace][k],
                    "D_total [req/s]": self.deviation_rps(trace, letter).mean(),
                    "published D_total [req/s]": PUBLISHED_D[trace][k],
                    "printed programs not proven": self.unfinished(trace, letter),
                }
            rows.append(row)
        return pd.DataFrame(rows)

    def figure(self) -> Figure:
        """Throughput as published, by search and at the optimum, a panel per trace."""
        across = len(self.traces)
        fig, axes = plt.subplots(1, across, figsize=(4.5 * across, 3.4), squeeze=False)
        for axis, trace in zip(axes[0], self.traces, strict=True):
            proven = {r: [self.optimum[trace, r, k].served_rps for k in INVENTORIES] for r in READ}
            bars = pd.DataFrame(
                {
                    "published": [float(v) for v in PUBLISHED[trace]],
                    "search, reading 'thesis'": [
                        self.best_rps(trace, letter).mean() for letter in INVENTORIES
                    ],
                    **{f"optimum, '{reading}'": rps for reading, rps in proven.items()},
                },
                index=[f"({i})\n" + "/".join(map(str, n)) for i, n in INVENTORIES.items()],
            ).melt(ignore_index=False)
            sns.barplot(bars, x=bars.index, y="value", hue="variable", saturation=1, ax=axis)
            axis.set(title=f"Azure {trace}", xlabel="H200 / H800 / H20", ylabel="")
        axes[0, 0].set_ylabel("throughput [requests/s]")
        figures.shared_legend(fig, ncols=2)
        return fig

    def throughput_claims(self) -> Iterator[dict[str, Any]]:
        """Throughputs of Rignall's Table 5.1 (rignall-1, 2), gains over uniform fleets (3, 4)."""
        for trace, letter in product(self.traces, INVENTORIES):
            thesis, fitting = (self.optimum[trace, reading, letter].served_rps for reading in READ)
            best = self.best_rps(trace, letter)
            note = (
                "Reading 'thesis', standard GP, R_total the smaller phase. Proven optimum "
                f"{thesis:.0f} req/s, with reading 'fitting' {fitting:.0f}. W, tau, M, the decode "
                "batch and the range of n_t are not published; unfinished inner solves with "
                "forced capacity would lower the published values."
            )
            number = f"{1 if trace == 'code' else 2}{letter}"
            yield claim(number, float(best.mean()), "table51", note, interval=extent(best))
        gains = (("3", "code", "b"), ("4", "conv", "a"))
        for number, trace, letter in gains[: len(self.traces)]:
            best, uniform = (self.best_rps(trace, each).mean() for each in (letter, "c"))
            exactly = " and ".join(
                f"{mixed.served_rps / alike.served_rps:.2f} ('{reading}')"
                for reading in READ
                for mixed, alike in [[self.optimum[trace, reading, k] for k in (letter, "c")]]
            )
            note = f"Ratio of the means over seeds; at the proven optima {exactly}."
            yield claim(number, float(best / uniform), "table51", note)

    def deviation_claims(self) -> Iterator[dict[str, Any]]:
        """Deviations D_total of Rignall's Table 5.1 (rignall-17)."""
        for k, (trace, letter) in enumerate(product(self.traces, INVENTORIES)):
            deviation = self.deviation_rps(trace, letter)
            note = (
                "Printed program with tau = 0.5 and M = 1000, neither published, at the best "
                f"layout of each seed; {self.unfinished(trace, letter)} of {len(deviation)} "
                "programs stopped at 200 nodes. The price M makes the mix exact wherever the "
                "layout allows it."
            )
            number, value = f"17{'abcdef'[k]}", float(deviation.mean())
            yield claim(number, value, "table51", note, interval=extent(deviation))


def progress(
    groups: Mapping[Any, Sequence[Search]], title: str, bound: float | Mapping[Any, float]
) -> Figure:
    """Best throughput over iterations, a panel per setting: mean and range over trials.

    Parameters
    ----------
    bound
        Proven optimum, of all settings or of each; the dotted line is the best of all trials.
    """
    fig, axes = plt.subplots(
        1, len(groups), figsize=(2.9 * len(groups) + 1, 3.2), sharey=True, squeeze=False
    )
    top = max(ends(searches).max() for searches in groups.values())
    for axis, (key, searches) in zip(axes[0], groups.items(), strict=True):
        limit = bound[key] if isinstance(bound, Mapping) else bound
        runs = np.array([each.trace_rps for each in searches])
        x = _over_batches(runs, axis, color=figures.CYCLE[0])
        axis.axhline(limit, linestyle="--", color="#444444", linewidth=1)
        axis.axhline(top, linestyle=":", color="#444444", linewidth=1)
        missing = 100 * (1 - ends(searches).mean() / limit)
        axis.set(title=f"{title} {key:g}\nregret {missing:.1f} %", xlabel="iteration")
        axis.set_xticks(x if len(x) < 8 else x[::4])
    axes[0, 0].set_ylabel("best throughput [requests/s]")
    return fig


def regrets(groups: Mapping[str, Sequence[Search]], optimum_rps: float) -> Figure:
    """Share of the optimum that each method misses, over batches."""
    fig, axis = plt.subplots(figsize=(6.4, 3.4))
    for colour, (method, searches) in zip(figures.CYCLE, groups.items(), strict=False):
        regret = 100 * np.array([each.regret(optimum_rps) for each in searches])
        x = _over_batches(regret, axis, label=method, color=colour)
    batch = next(iter(groups.values()))[0].batch
    axis.set(xlabel=f"batches of {batch}", ylabel="regret [%]", ylim=(0, None))
    axis.set_xticks(x)
    axis.legend(title="method")
    return fig


def times(divider_s: Mapping[int, float], direct_s: Mapping[tuple[str, int], float]) -> Figure:
    """CPU time of a search by batch size, and of the direct one by method and batch size."""
    fig, axes = plt.subplots(1, 2, figsize=(8.2, 3.2))
    axes[0].plot(list(divider_s), list(divider_s.values()), "o-", color=figures.CYCLE[0])
    axes[0].set(
        title="divider", xlabel="batch size", ylabel="CPU time of a search [s]", ylim=(0, None)
    )
    axes[0].set_xticks(list(divider_s))
    batches = sorted({batch for _, batch in direct_s})
    for k, (method, label) in enumerate((("bo", "standard GP"), ("saasbo", "SAASBO"))):
        heights = [direct_s[method, batch] for batch in batches]
        x = np.arange(len(batches)) + 0.4 * (k - 0.5)
        axes[1].bar(x, heights, 0.38, label=label, color=figures.CYCLE[k])
    axes[1].set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes[1].set(title="direct, 16 slots", xlabel="batch size")
    axes[1].legend()
    return fig


def _over_batches(runs: NDArray[np.float64], axis: Axes, **options: Any) -> NDArray[np.int64]:
    x = np.arange(1, runs.shape[1] + 1)
    figures.mean_and_range(x, runs, axis, marker="o", markersize=4, **options)
    return x
