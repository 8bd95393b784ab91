"""Searches for layouts of islands, and the largest load beside them (Rignall, 5.3 and 5.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from hetero import paths, workload
from hetero.intervals import interval
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.inner import Deviations
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.parallelism import READINGS
from hetero.planners.rignall.rates import RateTable
from hetero.planners.rignall.search import Method, Objective, Search, Space, search
from hetero.plots import figures

#: Inventories of Rignall's Table 5.1, 512 $/h each, and what the thesis prints for them.
GPUS: Final = ("H200", "H800", "H20")
INVENTORIES: Final = {"a": (64, 64, 128), "b": (32, 128, 128), "c": (128, 0, 0)}
PUBLISHED: Final = {"code": (176, 199, 139), "conv": (138, 126, 114)}
PUBLISHED_D: Final = {"code": (18, 22, 25), "conv": (5, 45.5, 7)}
#: Their deviations over five trials.
PUBLISHED_STD: Final = {"code": (20, 21, 46), "conv": (16, 12, 5)}
PUBLISHED_D_STD: Final = {"code": (18, 15, 22), "conv": (9, 46, 10)}

#: Values of W, tau and M, which the thesis does not print, that are tried.
WIDTHS: Final = (200, 300, 400, 500, 600, 800, 1000, 2000)
TAUS: Final = (0.1, 0.5, 1.0)
PRICES: Final = (1.0, 1000.0)
#: Layouts that a triple is tried on: random ones, the same for every triple.
LAYOUTS: Final = 12
TRIPLE: Final = ("width_tokens", "tau", "price")


def tabulated(
    model: IslandModel, gpus: Sequence[str], most: int, printed: Deviations | None = None
) -> Objective:
    """Layouts of these types valued by the rates of every size from 2 to ``most`` GPUs.

    Parameters
    ----------
    printed
        tau and M of the program of 4.8.1, which then values layouts by R_total as 4.4.2 prints
        it; without them, the largest load does.
    """
    rates = model.rates([(gpu, size) for gpu in gpus for size in range(2, most + 1)])
    return Objective(rates) if printed is None else Objective(rates, "aggregated", printed)


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
            text = f"{space.kind} {method} {batch} {seed} {_digest(objective)}"
            name = "".join(c if c.isalnum() else "-" for c in text)
            file = None if self.folder is None else self.folder / f"{name}.json"
            budget: dict[str, Any] = {"batch": batch, "iterations": iterations}
            searches.append(search(space, objective, method, **budget, seed=seed, state=file))
        return searches


def _digest(objective: Objective) -> str:
    """What tells objectives apart: other lengths give the same space other values."""
    rates = objective.rates
    text = f"{objective.form} {objective.deviations} {rates.classes}".encode()
    for array in (rates.share, rates.prefill_rps, rates.decode_rps):
        text += array.tobytes()
    return hashlib.sha256(text).hexdigest()[:12]


def ends(searches: Sequence[Search]) -> NDArray[np.float64]:
    """Best throughput of each trial [requests/s]."""
    return np.array([each.trace_rps[-1] for each in searches])


def spread(values: NDArray[np.float64]) -> float:
    """Standard deviation over trials; 0 of a single one."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def claim(
    number: int | str, values: ArrayLike, figure: str, note: str, **more: Any
) -> dict[str, Any]:
    """What :meth:`ResultFolder.claim` takes: the mean over trials, and its interval if several."""
    x = np.atleast_1d(np.asarray(values, np.float64))
    told = {"claim": f"rignall-{number}", "value": float(x.mean()), "figure": figure, "note": note}
    return told | ({"interval": interval(x)} if len(x) > 1 else {}) | more


def spreads(
    number: int | str,
    pairs: Sequence[Sequence[Sequence[Search]]],
    figure: str,
    note: str,
    *,
    share: bool = False,
) -> dict[str, Any]:
    """A claim on how standard deviations of two groups of trials compare, later over earlier.

    Parameters
    ----------
    share
        Whether the share of pairs whose deviation rises counts, not the ratio of the only pair.
    """
    both = [[ends(searches) for searches in pair] for pair in pairs]
    ratios = np.array([spread(later) / max(spread(earlier), 1e-9) for earlier, later in both])
    counts = len(both[0][0]), len(both[0][1])
    odds = stats.f.ppf(0.975, counts[1] - 1, counts[0] - 1)
    told = (ratios, ratios / np.sqrt(odds), ratios * np.sqrt(odds))
    value, *found = (float(np.mean(x > 1 if share else x)) for x in told)
    more = {"interval": tuple(found)} if min(counts) > 1 else {}
    return claim(number, value, figure, note, **more)


@dataclass(frozen=True)
class Fleets:
    """Rignall's Table 5.1: mixed and uniform fleets of the same price, by trace and inventory.

    Attributes
    ----------
    optimum
        By trace, reading and inventory: the largest load of all layouts.
    searches
        Trials of the divider for R_total under the reading *thesis*.
    """

    optimum: dict[tuple[str, str, str], Assignment]
    searches: dict[tuple[str, str], list[Search]]

    @classmethod
    def of(
        cls,
        models: Mapping[tuple[str, str], IslandModel],
        printed: Deviations,
        trials: Trials,
        batch: int,
        iterations: int,
    ) -> Fleets:
        """Search and solve every inventory for the model of each trace and reading."""
        fleets = cls({}, {})
        for (trace, reading), model in models.items():
            objective = tabulated(model, GPUS, 128, printed)
            for letter, counts in INVENTORIES.items():
                inventory = held(objective.rates, counts)
                fleets.optimum[trace, reading, letter] = exact(
                    objective.rates, inventory, minimum=2
                )
                if reading == "thesis":
                    fleets.searches[trace, letter] = trials(
                        Divider(inventory), objective, "bo", batch, iterations
                    )
        return fleets

    @property
    def traces(self) -> list[str]:
        """Their names, in order."""
        return list(dict.fromkeys(trace for trace, _ in self.searches))

    def plans(self, trace: str, letter: str) -> list[Assignment]:
        """What each trial ends with."""
        return [each.best for each in self.searches[trace, letter] if each.best is not None]

    def total_rps(self, trace: str, letter: str) -> NDArray[np.float64]:
        """R_total of each trial."""
        return ends(self.searches[trace, letter])

    def deviation_rps(self, trace: str, letter: str) -> NDArray[np.float64]:
        """D_total of each trial."""
        return np.array([each.deviation_rps for each in self.plans(trace, letter)])

    def table(self) -> pd.DataFrame:
        """Rignall's Table 5.1 beside the load that its plans carry, and the largest load."""
        rows = []
        for (trace, reading, letter), proven in self.optimum.items():
            row: dict[str, object] = {"trace": trace, "reading": reading, "inventory": letter}
            if reading == "thesis":
                k = list(INVENTORIES).index(letter)
                for name, values, published in (
                    ("R_total", self.total_rps(trace, letter), PUBLISHED),
                    ("D_total", self.deviation_rps(trace, letter), PUBLISHED_D),
                ):
                    row |= {
                        f"{name} [req/s]": values.mean(),
                        f"std of {name} [req/s]": spread(values),
                        f"published {name} [req/s]": published[trace][k],
                    }
                plans = self.plans(trace, letter)
                flow = [Objective(plan.rates)(plan.layout) for plan in plans]
                row["load of the mix carried [req/s]"] = np.mean([p.served_rps for p in plans])
                row["largest load of these layouts [req/s]"] = np.mean(flow)
            row |= {"largest load [req/s]": proven.served_rps, "bound [req/s]": proven.bound}
            rows.append(row | {"its R_total [req/s]": proven.expected_rps})
        return pd.DataFrame(rows)

    def figure(self) -> Figure:
        """R_total and D_total with their deviations over trials, and as published."""
        size = (3.6 * len(self.traces) + 0.6, 5.2)
        fig, axes = plt.subplots(2, len(self.traces), figsize=size, squeeze=False, sharex=True)
        x = np.arange(len(INVENTORIES))
        for column, trace in zip(axes.T, self.traces, strict=True):
            for axis, values, published, error in (
                (column[0], self.total_rps, PUBLISHED, PUBLISHED_STD),
                (column[1], self.deviation_rps, PUBLISHED_D, PUBLISHED_D_STD),
            ):
                ours = pd.DataFrame({letter: values(trace, letter) for letter in INVENTORIES})
                style = {"errorbar": "sd", "capsize": 0.15, "err_kws": {"linewidth": 1.2}}
                sns.barplot(ours, width=0.6, label="ours", color=figures.CYCLE[0], ax=axis, **style)
                printed = {"fmt": "D", "capsize": 4, "color": "#222222", "label": "published"}
                axis.errorbar(x + 0.2, published[trace], error[trace], **printed)
            column[0].set_title(f"Azure {trace}")
            column[1].set_yscale("symlog", linthresh=10)
            column[1].set_ylim(bottom=0)
            column[1].set_xlabel("H200 / H800 / H20")
            ticks = [f"({i})\n" + " / ".join(map(str, n)) for i, n in INVENTORIES.items()]
            column[1].set_xticks(x, ticks)
        for axis, name in zip(axes[:, 0], ("R_total", "D_total"), strict=True):
            axis.set_ylabel(f"{name} [requests/s]")
        figures.shared_legend(fig)
        return fig

    def throughput_claims(self, how: str) -> Iterator[dict[str, Any]]:
        """R_total of Rignall's Table 5.1 (rignall-1, 2), gains over uniform fleets (3, 4)."""
        for trace, letter in product(self.traces, INVENTORIES):
            proven = self.optimum[trace, "thesis", letter]
            note = (
                f"Smaller phase of rates weighted by p (4.4.2), {how}. The largest load is "
                f"{proven.served_rps:.0f} req/s and has R_total {proven.expected_rps:.0f}."
            )
            number = f"{1 if trace == 'code' else 2}{letter}"
            yield claim(number, self.total_rps(trace, letter), "table51", note)
        gains = (("3", "code", "b"), ("4", "conv", "a"))
        for number, trace, letter in gains[: len(self.traces)]:
            gain = self.total_rps(trace, letter) / self.total_rps(trace, "c")
            mixed, alike = (self.optimum[trace, "thesis", k].served_rps for k in (letter, "c"))
            note = f"Mean over seeds; of the largest loads {mixed / alike:.2f}."
            yield claim(number, gain, "table51", note)

    def deviation_claims(self, how: str) -> Iterator[dict[str, Any]]:
        """Deviations D_total of Rignall's Table 5.1 (rignall-17)."""
        for k, (trace, letter) in enumerate(product(self.traces, INVENTORIES)):
            yield claim(
                f"17{'abcdef'[k]}",
                self.deviation_rps(trace, letter),
                "table51",
                f"Of the best layout of each seed, {how}. Islands give out their whole time: what "
                "a phase has to spare shows as deviation.",
            )


def progress(groups: Mapping[Any, Sequence[Search]], title: str) -> Figure:
    """Best R_total over iterations, a panel per setting: mean, deviation and range over trials.

    The dotted line is the best of all trials, as in the thesis.
    """
    fig, axes = plt.subplots(
        1, len(groups), figsize=(2.5 * len(groups) + 1, 3.2), sharey=True, squeeze=False
    )
    top = max(ends(searches).max() for searches in groups.values())
    colour = figures.CYCLE[0]
    for axis, (key, searches) in zip(axes[0], groups.items(), strict=True):
        runs = np.array([each.trace_rps for each in searches])
        x, mean = np.arange(1, runs.shape[1] + 1), runs.mean(axis=0)
        std = np.array([spread(column) for column in runs.T])
        axis.fill_between(
            x, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.15, lw=0, label="range"
        )
        axis.fill_between(
            x,
            mean - std,
            mean + std,
            color=colour,
            alpha=0.3,
            lw=0,
            label="mean \N{PLUS-MINUS SIGN} std",
        )
        axis.plot(x, mean, "o-", color=colour, markersize=4, label="mean over trials")
        axis.axhline(top, linestyle=":", color="#444444", linewidth=1, label="best of all trials")
        axis.set(
            title=f"{title} {key}".strip() + f"\n{mean[-1]:.0f} \N{PLUS-MINUS SIGN} {std[-1]:.1f}",
            xlabel="iteration",
        )
        axis.set_xticks(x[:: 1 + len(x) // 8])
    axes[0, 0].set_ylabel("best R_total [requests/s]")
    figures.shared_legend(fig)
    return fig


def scan() -> pd.DataFrame:
    """Best R_total and its D_total of the first batch, by triple, trace and inventory.

    Nothing is searched, so that a triple costs seconds; every triple sees the same layouts. Lengths
    are those of the twins.
    """
    rows = []
    for trace, width in product(PUBLISHED, WIDTHS):
        lengths = workload.load(f"azure2023_{trace}", "twin")
        model = IslandModel.of_trace(lengths, width, reading=READINGS["thesis"])
        for tau, price in product(TAUS, PRICES):
            objective = tabulated(model, GPUS, 128, Deviations(tau, price))
            for letter, counts in INVENTORIES.items():
                space = Divider(held(objective.rates, counts))
                best = search(space, objective, "random", batch=LAYOUTS, iterations=1).best
                total, apart = (best.expected_rps, best.deviation_rps) if best else (0.0, 0.0)
                row = (trace, letter, width, tau, price, round(total, 2), round(apart, 2))
                rows.append(row)
    columns = ["trace", "inventory", *TRIPLE, "r_total_rps", "d_total_rps"]
    return pd.DataFrame(rows, columns=columns)


def committed() -> pd.DataFrame:
    """The scan as it lies in ``data/``."""
    return pd.read_csv(paths.data("measured", "island_scan.csv"))


def misses(scanned: pd.DataFrame) -> pd.DataFrame:
    """By triple and trace, the root mean square of ln(R_total / published) over inventories."""
    keys = zip(scanned["trace"], scanned["inventory"], strict=True)
    published = [PUBLISHED[trace][list(INVENTORIES).index(letter)] for trace, letter in keys]
    squares = np.log(scanned["r_total_rps"] / published) ** 2
    return scanned.assign(miss=squares).pivot_table("miss", list(TRIPLE), "trace") ** 0.5


def chosen(scanned: pd.DataFrame) -> tuple[int, float, float]:
    """The triple that misses the conversation rows least; no other row is looked at."""
    missed = misses(scanned).reset_index()
    best = missed.iloc[int(missed["conv"].to_numpy().argmin())]
    return int(best["width_tokens"]), float(best["tau"]), float(best["price"])


def scanned(rows: pd.DataFrame) -> Figure:
    """R_total over W by inventory for the chosen tau and M, and how far each triple misses."""
    width, tau, price = chosen(rows)
    fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.4))
    here = rows[(rows["tau"] == tau) & (rows["price"] == price)]
    for axis, (trace, published) in zip(axes, PUBLISHED.items(), strict=False):
        for letter, value, color in zip(INVENTORIES, published, figures.CYCLE, strict=False):
            one = here[(here["trace"] == trace) & (here["inventory"] == letter)]
            x, y = one["width_tokens"], one["r_total_rps"]
            axis.plot(x, y, "o-", markersize=4, label=f"({letter})", color=color)
            axis.axhline(value, linestyle="--", linewidth=1, color=color)
        axis.set(title=f"Azure {trace}", ylabel="best R_total [requests/s]", yscale="log")
        axis.set_yticks((20, 50, 100, 200, 400), ("20", "50", "100", "200", "400"))
        axis.legend(title="inventory", loc="lower right")
    missed = misses(rows).reset_index()
    for each in product(TAUS, PRICES):
        one = missed[(missed["tau"] == each[0]) & (missed["price"] == each[1])]
        label = f"{each[0]:g}, {each[1]:g}"
        axes[2].plot(one["width_tokens"], one["conv"], ".-", label=label)
    axes[2].set(title="conversation: miss", ylabel="rms of ln(R_total / published)")
    axes[2].legend(title="tau, M")
    for axis in axes:
        axis.axvline(width, color="#444444", linestyle=":", linewidth=1)
        axis.set(xlabel="W [tokens]", xscale="log")
        axis.set_xticks(WIDTHS, [str(w) for w in WIDTHS], rotation=45)
        axis.minorticks_off()
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
