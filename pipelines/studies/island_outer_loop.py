"""Searches for layouts of islands, and the largest load beside them (Rignall, 5.3 and 5.4)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
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
from hetero.planners.rignall.search import Objective, Search, Trials, search
from hetero.plots import figures
from pipelines import kept

#: Inventories of Rignall's Table 5.1, 512 $/h each, and what the thesis prints for them.
GPUS: Final = ("H200", "H800", "H20")
INVENTORIES: Final = {"a": (64, 64, 128), "b": (32, 128, 128), "c": (128, 0, 0)}
PUBLISHED: Final = {"code": (176, 199, 139), "conv": (138, 126, 114)}
PUBLISHED_D: Final = {"code": (18, 22, 25), "conv": (5, 45.5, 7)}
#: Their deviations over five trials.
PUBLISHED_STD: Final = {"code": (20, 21, 46), "conv": (16, 12, 5)}
PUBLISHED_D_STD: Final = {"code": (18, 15, 22), "conv": (9, 46, 10)}

#: Values of W and tau, which the thesis does not print, that are tried.
WIDTHS: Final = (200, 300, 400, 500, 600, 800, 1000, 2000)
TAUS: Final = (0.1, 0.5, 1.0)
#: M, a "large constant" in the thesis: from about 10 on a larger one changes nothing.
PRICE: Final = 1000.0
#: Layouts that a pair is tried on: random ones, the same for every pair.
LAYOUTS: Final = 12
PAIR: Final = ("width_tokens", "tau")

#: What the path of a search rests on: modules, and releases beside the code of this project.
SEARCHING: Final = ("hetero/planners/rignall/", "hetero/programs.py", "hetero/streams.py")
RELEASES: Final = ("ax-platform", "botorch", "gpytorch", "jax", "numpyro", "ortools", "torch")

#: CPU time of a layout in divider, direct and SAASBO searches [s] (AMD EPYC, 2026-11-27, Ax 1.3.1).
LAYOUT_CPU_S: Final = (0.55, 1.3, 4.0)


def folder(state: str, code: Mapping[str, str]) -> Path | None:
    """Folder of searches, by what proposes layouts and solves them: their files tell its rates."""
    os.environ |= {  # half of the sparse model's time goes into what jax compiles
        "JAX_COMPILATION_CACHE_DIR": str(paths.root() / "pipelines/build/compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return kept.folder(state, code, SEARCHING, RELEASES)


def forecast(section: Mapping[str, Any]) -> str:
    """How long the searches of the paper profile take, by three that were measured."""
    few, trials = section["direct_batches"], len(section["few_seeds"])
    others = 8 * (len(section["skews"]) + len(section["minimums"]) - 2)
    divider = len(section["seeds"]) * section["iterations"] * (sum(section["batches"]) + others)
    fleets = 3 * trials * len(section["workloads"]) * section["fleet_iterations"]
    divider += fleets * max(section["batches"])
    direct, slots = trials * section["direct_iterations"], few[0] * (len(section["slots"]) - 1)
    layouts = (divider, direct * sum(few), direct * (sum(few) + slots))
    hours = sum(n * s for n, s in zip(layouts, LAYOUT_CPU_S, strict=True)) / 3600
    return f"Searches of islands: {sum(layouts):,} layouts, about {hours:.1f} CPU hours."


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
        return np.array([round(each.deviation_rps, 6) for each in self.plans(trace, letter)])

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
                load_served = float(np.mean([plan.served_rps for plan in plans]))
                largest = np.mean([Objective(plan.rates)(plan.layout) for plan in plans])
                row |= {
                    "load of the mix carried [req/s]": load_served,
                    "share of the largest load carried": load_served / proven.served_rps,
                    "largest load of these layouts [req/s]": largest,
                }
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


def divider_claims(
    by_batch: Mapping[int, Sequence[Search]],
    by_skew: Mapping[float, Sequence[Search]],
    by_minimum: Mapping[int, Sequence[Search]],
    loads: pd.DataFrame,
    how: str,
) -> Iterator[dict[str, Any]]:
    """Batches (rignall-10, 19), skews (12a) and smallest islands (13), where several were tried."""
    if len(by_batch) > 1:
        small, large = (by_batch[pick(by_batch)] for pick in (min, max))
        yield spreads(10, [(small, large)], "fig55_batch", f"Of R_total, {how}.")
        yield claim(19, ends(large) / ends(small), "fig55_batch", how)
    if len(by_skew) > 1:
        least, most = min(by_skew), max(by_skew)
        note = f"Skew up to {most:g} over up to {least:g}; the narrowest is not published; {how}."
        yield claim("12a", ends(by_skew[most]) / ends(by_skew[least]), "fig57_skew", note)
    if doublings := len(by_minimum) - 1:
        halved = ends(by_minimum[max(by_minimum)]) / ends(by_minimum[min(by_minimum)])
        each = [float(x) ** (1 / doublings) for x in loads.iloc[-1, 2:] / loads.iloc[0, 2:]]
        note = (
            f"Doublings from {min(by_minimum)} to {max(by_minimum)}, {how}; of the largest loads "
            f"{each[0]:.2f}, with reading 'fitting' {each[1]:.2f}."
        )
        yield claim(13, halved ** (1 / doublings), "fig58_minimum", note)


def direct_claims(
    direct: Mapping[tuple[str, int], Sequence[Search]],
    by_slots: Mapping[int, Sequence[Search]],
    by_batch: Mapping[int, Sequence[Search]],
    how: str,
) -> Iterator[dict[str, Any]]:
    """Direct against divider (rignall-14), slots (16), batches (18), where several were tried."""
    trials = min(len(searches) for searches in (*direct.values(), *by_batch.values()))
    best, other = (
        np.max([ends(searches)[:trials] for searches in found.values()], axis=0)
        for found in (direct, by_batch)
    )
    yield claim(14, best / other, "fig510_direct", f"Best of all batch sizes by seed; {how}.")
    if steps := list(pairwise(by_slots[k] for k in sorted(by_slots))):
        rises = np.mean([ends(later) > ends(earlier) for earlier, later in steps], axis=0)
        note = f"K = {', '.join(map(str, sorted(by_slots)))}; {how}."
        yield claim("16a", rises, "fig512_slots", note)
        yield spreads("16b", steps, "fig512_slots", note, share=True)
    sparse = {batch: searches for (method, batch), searches in direct.items() if method != "bo"}
    if len(sparse) > 1:
        few, many = (sparse[pick(sparse)] for pick in (min, max))
        yield claim("18a", ends(many) / ends(few), "fig59_direct", f"{how}.")
        yield spreads("18b", [(few, many)], "fig59_direct", f"{how}.")


def progress_figure(groups: Mapping[Any, Sequence[Search]], title: str) -> Figure:
    """Best R_total over iterations, a panel per setting: mean, deviation and range over trials.

    The dotted line is the best of all trials, as in the thesis.
    """
    size = (max(2.5 * len(groups) + 1, 6.0), 3.2)  # the legend has its width
    fig, axes = plt.subplots(1, len(groups), figsize=size, sharey=True, squeeze=False)
    top = max(ends(searches).max() for searches in groups.values())
    colour = figures.CYCLE[0]
    for axis, (key, searches) in zip(axes[0], groups.items(), strict=True):
        runs = np.array([each.trace_rps for each in searches])
        x, mean = np.arange(1, runs.shape[1] + 1), runs.mean(axis=0)
        std = np.array([spread(column) for column in runs.T])
        within = ("mean \N{PLUS-MINUS SIGN} std", mean - std, mean + std, 0.3)
        for label, low, high, alpha in (("range", runs.min(0), runs.max(0), 0.15), within):
            axis.fill_between(x, low, high, color=colour, alpha=alpha, lw=0, label=label)
        axis.plot(x, mean, "o-", color=colour, markersize=4, label="mean over trials")
        axis.axhline(top, linestyle=":", color="#444444", linewidth=1, label="best of all trials")
        axis.set(
            title=f"{title} {key}".strip() + f"\n{mean[-1]:.0f} \N{PLUS-MINUS SIGN} {std[-1]:.1f}",
            xlabel="iteration",
        )
        axis.set_xticks(x[:: 1 + len(x) // 8])
    axes[0, 0].set_ylabel("best $R_{total}$ [requests/s]")
    figures.shared_legend(fig)
    return fig


def comparison_frame(methods: Mapping[str, Sequence[Search]]) -> pd.DataFrame:
    """What each method ends with: mean over trials, and its 95 % interval if several."""
    rows = []
    for name, searches in methods.items():
        values = ends(searches)
        low, high = interval(values) if len(values) > 1 else (np.nan, np.nan)
        rows.append((name, len(values), len(searches[0].values_rps), values.mean(), low, high))
    columns = ["method", "trials", "layouts", "best R_total [req/s]", "low [req/s]", "high [req/s]"]
    return pd.DataFrame(rows, columns=columns)


def scan() -> pd.DataFrame:
    """Best R_total and its D_total of the first batch, by W, tau, trace and inventory.

    Nothing is searched, so that a pair costs seconds; every pair sees the same layouts. Lengths
    are those of the twins.
    """
    rows = []
    for trace, width in product(PUBLISHED, WIDTHS):
        lengths = workload.load(f"azure2023_{trace}", "twin")
        model = IslandModel.of_trace(lengths, width, reading=READINGS["thesis"])
        for tau in TAUS:
            objective = tabulated(model, GPUS, 128, Deviations(tau, PRICE))
            for letter, counts in INVENTORIES.items():
                space = Divider(held(objective.rates, counts))
                best = search(space, objective, "random", batch=LAYOUTS, iterations=1).best
                total, apart = (best.expected_rps, best.deviation_rps) if best else (0.0, 0.0)
                rows.append((trace, letter, width, tau, round(total, 2), round(apart, 2)))
    return pd.DataFrame(rows, columns=["trace", "inventory", *PAIR, "r_total_rps", "d_total_rps"])


def committed_frame() -> pd.DataFrame:
    """The scan as it lies in ``data/``."""
    return pd.read_csv(paths.data("measured", "island_scan.csv"))


def misses_frame(scanned: pd.DataFrame) -> pd.DataFrame:
    r"""By W, tau and trace, the root mean square over inventories of both relative errors.

    :math:`\ln(R / R^*)` and :math:`(D - D^*) / R^*` for R_total, D_total and the published.
    """
    keys = zip(scanned["trace"], scanned["inventory"], strict=True)
    which = [(trace, list(INVENTORIES).index(letter)) for trace, letter in keys]
    total = np.array([PUBLISHED[trace][k] for trace, k in which])
    apart = scanned["d_total_rps"] - [PUBLISHED_D[trace][k] for trace, k in which]
    squares = np.log(scanned["r_total_rps"] / total) ** 2 + (apart / total) ** 2
    return scanned.assign(miss=squares).pivot_table("miss", list(PAIR), "trace") ** 0.5


def chosen(scanned: pd.DataFrame) -> tuple[int, float]:
    """W and tau that miss the conversation rows least, the smaller where they tie."""
    missed = misses_frame(scanned).reset_index()
    best = missed.iloc[int(missed["conv"].to_numpy().argmin())]
    return int(best["width_tokens"]), float(best["tau"])


def scan_figure(rows: pd.DataFrame) -> Figure:
    """R_total over W by inventory for the chosen tau, and how far each W misses."""
    width, tau = chosen(rows)
    fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.4))
    here = rows[rows["tau"] == tau]
    for axis, (trace, published) in zip(axes, PUBLISHED.items(), strict=False):
        for letter, value, color in zip(INVENTORIES, published, figures.CYCLE, strict=False):
            one = here[(here["trace"] == trace) & (here["inventory"] == letter)]
            x, y = one["width_tokens"], one["r_total_rps"]
            axis.plot(x, y, "o-", markersize=4, label=f"({letter})", color=color)
            axis.axhline(value, linestyle="--", linewidth=1, color=color)
        axis.plot([], [], "--", linewidth=1, color="#444444", label="in the thesis")
        axis.plot([], [], ":", linewidth=1, color="#444444", label="W taken here")
        axis.set(title=f"Azure {trace}", ylabel="best $R_{total}$ [requests/s]", yscale="log")
        axis.set(ylim=(8, 500), yticks=(20, 50, 100, 200, 400))
        axis.set_yticklabels(("20", "50", "100", "200", "400"))
        axis.legend(title="inventory", loc="lower right", fontsize=7)
    missed = misses_frame(rows).xs(tau, level="tau")
    for trace in PUBLISHED:
        axes[2].plot(missed.index, missed[trace], ".-", label=trace)
    axes[2].set(title="distance to the thesis", ylabel="rms error of $R_{total}$ and $D_{total}$")
    axes[2].set_ylim(0, 1.3 * missed.to_numpy().max())
    axes[2].legend(ncols=2, loc="upper center")
    for axis in axes:
        axis.axvline(width, color="#444444", linestyle=":", linewidth=1)
        axis.set(xlabel="width W of a range [tokens]", xscale="log")
        axis.set_xticks(WIDTHS, [str(w) for w in WIDTHS], rotation=45)
        axis.minorticks_off()
    return fig


def time_figure(
    divider_s: Mapping[int, float], direct_s: Mapping[tuple[str, int], float]
) -> Figure:
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
