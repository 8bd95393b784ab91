"""Figures of HeteroServe's experiments, and its claims: values, verdicts and what explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from textwrap import fill
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hetero import cluster
from hetero.intervals import interval, ranking
from hetero.plots import figures
from pipelines.studies import heteroserve as hs
from pipelines.studies.heteroserve import MAIN, P95, SETTINGS, SLO, TPS, Setting, at, grid, values
from pipelines.studies.ledger import claims_of

#: The paper's rows of the ledger, by id.
claims = partial(claims_of, "heteroserve")
#: One number per seed, one of their means, or an order.
Value = NDArray[np.float64] | float | str

_ROWS: Final = {
    "Uniform": "uniform", "Capacity-prop.": "capacity", "Oracle": "oracle",
    "Latency-Aware": "latency", "HeteroServe": "heteroserve",
}  # fmt: skip
#: The figure that shows a claim, by its number; fig3 shows the others.
SHOWN_IN: Final = {"10": "load", "30": "bimodal_share", "19": "fig8", "31": "fig4"} | {
    number: name
    for name, numbers in (
        ("fig5", ("7", "8", "9", "26")),
        ("fig6", ("11", "29")),
        ("fig7", ("15", "28")),
        ("sweeps", ("12", "13", "14", "27", "32")),
    )
    for number in numbers
}
#: Both decode models at their own saturation.
_OWN: Final = (MAIN, hs.WEIGHTS_ONLY)
_COLOURS: Final = {
    name: "#777777" if k is None else figures.CYCLE[k]
    for name, k in zip((*_ROWS, "hetero"), (None, 5, 3, 1, 0, 2), strict=True)
}
#: Workloads of 4.1 and 4.4 that the five of fig. 6 leave out.
_BESIDE_FIG6: Final = {"lognormal", "mean 2,048"}
#: Row of the ablation that section 4.3 prints: static weights, unbounded queues.
_STATIC: Final = "no queue-awareness"
#: What 4.4 prints of fig. 6.
_BIMODAL: Final = {
    SLO: {"Uniform": 26.7, "HeteroServe": 12.1},
    TPS: {"Uniform": 22_368.0, "HeteroServe": 47_234.0},
}
_MARKS: Final = dict(zip(_COLOURS, "sv^DoX", strict=True))
_APART: Final[dict[str, Any]] = {"dodge": 0.6, "linestyle": "none", "err_kws": {"linewidth": 1}}
_LINES: Final[dict[str, Any]] = {"native_scale": True, "linewidth": 1.6}
_BY_SETTING: Final[dict[str, Any]] = {
    "err_kws": {"linewidth": 1},
    "markersize": 4.5,
    "hue": "setting",
    "palette": [figures.CYCLE[0 if decode == MAIN[0] else 1] for decode, _ in SETTINGS],
    "markers": [
        MarkerStyle("o", fillstyle="none" if load == hs.PUBLISHED else "full")
        for _, load in SETTINGS
    ],
    "markeredgewidth": 1,
}


def _by_scheduler(names: Sequence[str] = tuple(_COLOURS)) -> dict[str, Any]:
    return {
        "hue": "scheduler",
        "palette": {name: _COLOURS[name] for name in names},
        "markers": [_MARKS[name] for name in names],
        "errorbar": interval,
        "markersize": 4.5,
    }


def _ends(each: pd.Series[float]) -> tuple[float, float]:
    """95 % interval over seeds, kept above a tenth of the mean for axes in powers of ten."""
    low, high = interval(each)
    return max(low, 0.1 * float(np.mean(each))), high


def bars_figure(
    rows: pd.DataFrame,
    names: Sequence[str],
    beside: Sequence[str],
    printed: Mapping[str, Mapping[str, float]],
    height: float,
) -> Figure:
    """Three metrics by setting: the paper's rows, with bars and as published, above all others."""
    rows = rows.reset_index(drop=True)
    parts = [names, beside]
    fig, axes = plt.subplots(
        2, 3, figsize=(11, height), sharex="col", sharey="row",
        height_ratios=[len(part) + 0.6 for part in parts],
    )  # fmt: skip
    titles = {TPS: "Throughput", SLO: "SLO attainment", P95: "P95 TTFT"}
    for column, (metric, title) in zip(axes.T, titles.items(), strict=True):
        for axis, part in zip(column, parts, strict=True):
            placed: dict[str, Any] = {"x": metric, "y": "scheduler", "order": part, "ax": axis}
            if axis is column[0] and metric != P95:  # no bars on an axis in powers of ten
                sns.barplot(
                    at(rows, MAIN), **placed, color="#F6DFB0", saturation=1, width=0.7,
                    errorbar=None, zorder=0.5, label="judged setting",
                )  # fmt: skip
            dodged = {"dodge": 0.48, "linestyle": "none", "errorbar": _ends}
            sns.pointplot(rows, **placed, **_BY_SETTING, **dodged)
            axis.set(ylabel="", title="" if axis is column[1] else title)
            axis.set_yticks(range(len(part)), [fill(x, 26, break_on_hyphens=False) for x in part])
            axis.grid(visible=True)
        if known := printed.get(metric):
            style: dict[str, Any] = {"color": "black", "markersize": 5, "zorder": 1}
            column[0].plot(list(known.values()), list(known), "D", **style, label="published")
        column[0].set_xlabel("")
    axes[1, 0].set_title("Beside the paper")
    axes[1, 0].set_xlim(left=0)
    axes[1, 0].xaxis.set_major_locator(MaxNLocator(4))
    axes[1, 0].xaxis.set_major_formatter("{x:,.0f}")
    axes[1, 1].set_xlim(0, 101)
    axes[1, 2].set_xscale("log")
    for axis in axes[:, 2]:
        axis.axvline(500, color=figures.CYCLE[4], linestyle="--", linewidth=1, label="target")
    figures.shared_legend(fig, ncols=4)
    return fig


def first_tokens_figure(
    study: hs.Study, schedulers: Mapping[str, hs.Scheduler], settings: Sequence[Setting]
) -> Figure:
    """Distribution of the time to first token over all seeds, a panel per setting (fig. 4)."""
    fig, axes = plt.subplots(1, len(settings), figsize=(10, 3.8), sharey=True)
    for axis, setting in zip(axes, settings, strict=True):
        rate = study.nominal_rps(setting)
        runs = study.compared(setting, schedulers, rate, lambda run: {"ttft_s": run.ttft_s})
        for name, colour in _COLOURS.items():
            ttft_s = np.concatenate(values(runs, "ttft_s", scheduler=name))
            sns.ecdfplot(x=ttft_s, stat="percent", color=colour, label=name, ax=axis)
        axis.axvline(0.5, color=figures.CYCLE[4], linestyle="--", linewidth=1)
        axis.set(xscale="log", xlim=(0.01, 2000), xlabel="time to first token [s]", ylim=(0, 101))
        axis.set_title(f"{setting[0].capitalize()}, {setting[1]}")
    axes[0].set_ylabel("requests up to it [%]")
    axes[0].legend(loc="lower right")
    return fig


def load_figure(rows: pd.DataFrame) -> Figure:
    """SLO attainment over the load factor, at both decode models' own saturation (4.4)."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axis, setting in zip(axes, _OWN, strict=True):
        here = at(rows, setting)
        sns.lineplot(
            here.assign(percent=100 * here["factor"]), x="percent", y=SLO, **_by_scheduler(),
            style="scheduler", dashes=False, err_kws={"alpha": 0.12, "linewidth": 0},
            legend=axis is axes[1], ax=axis,
        )  # fmt: skip
        axis.set(xlabel="load [% of the own saturation]", ylim=(0, 101))
        axis.set_title(setting[0].capitalize())
    axes[0].set_ylabel(SLO)
    axes[1].legend(title="")
    return fig


def workloads_figure(rows: pd.DataFrame) -> Figure:
    """SLO attainment and throughput by workload, at both decode models' own saturation (fig. 6).

    First the five workloads of the paper's figure, then those of its other sections.
    """
    names = sorted(rows["workload"].unique(), key=lambda name: name in _BESIDE_FIG6)
    style = _by_scheduler() | _APART | {"order": names}
    fig, axes = _own_panels(rows, "workload", (SLO, TPS), (11, 6), **style)
    offsets = np.linspace(-0.3, 0.3, len(_COLOURS)) + names.index("bimodal")
    for axis, printed in zip(axes.flat, [_BIMODAL[SLO]] * 2 + [_BIMODAL[TPS]] * 2, strict=True):
        for name, value in printed.items():
            axis.plot(
                offsets[list(_COLOURS).index(name)], value, "D", markersize=5, zorder=4,
                color="black", markerfacecolor=_COLOURS[name], label="published",
            )  # fmt: skip
        axis.axvline(len(set(names) - _BESIDE_FIG6) - 0.5, color="#999999", linewidth=0.8, zorder=0)
    figures.shared_legend(fig)
    for top, bottom in axes.T:
        top.set_ylim(0, 104)
        bottom.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    axes[1, 0].set_ylim(0, None)
    axes[1, 0].yaxis.set_major_formatter("{x:,.0f}")
    return fig


def shares_figure(rows: pd.DataFrame, names: Sequence[str]) -> Figure:
    """SLO attainment above Uniform's by share of long prompts, a panel per scheduler (4.4)."""
    fig, axes = plt.subplots(1, len(names), figsize=(10, 3.4), sharey=True)
    uniform = rows[rows["scheduler"] == "Uniform"][SLO].to_numpy()
    for axis, name in zip(axes, names, strict=True):
        here = rows[rows["scheduler"] == name]
        here = here.assign(share=100 * here["share"], margin=here[SLO] - uniform)
        style = _BY_SETTING | _LINES | {"errorbar": interval}
        sns.pointplot(here, x="share", y="margin", **style, ax=axis)
        axis.axhline(0, color="#333333", linewidth=0.8)
        axis.set(xlabel="prompts above 2,048 tokens [%]", title=name)
    axes[0].set_ylabel("SLO attainment above Uniform's\n[points]")
    axes[0].get_legend().remove()
    axes[1].legend()
    return fig


def parameters_figure(rows: pd.DataFrame) -> Figure:
    """What delta, Q_max, lambda and K change, a panel each (4.5), with the two values printed."""
    fig, axes = plt.subplots(1, 4, figsize=(12, 3.4))
    panels = (
        ("delta", hs.P99, "safety margin δ", hs.P99),
        ("Q_max", hs.PASSED, "queue limit $Q_{max}$ [requests]", "requests not on an H100 [%]"),
        ("lambda", hs.COV, "dampening λ", "CoV of the device load [%]"),
        ("K, long to H100", SLO, "length bins K (long to H100)", SLO),
    )
    for axis, (name, metric, label, ylabel) in zip(axes, panels, strict=True):
        here = rows[rows["swept"] == name]
        sns.pointplot(here, x="value", y=metric, **_BY_SETTING, **_LINES, errorbar=_ends, ax=axis)
        axis.set(xlabel=label, ylabel=ylabel)
        ticks = list(here["value"].unique())
        if name in ("Q_max", "lambda"):
            axis.set(xscale="log")
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        else:
            axis.set_xticks(ticks)
    axes[0].set(yscale="log")
    axes[2].plot([2.0, 4.0], [5.0, 14.0], "D", color="black", label="published")
    figures.shared_legend(fig)
    return fig


def sizes_figure(rows: pd.DataFrame) -> Figure:
    """Throughput and scaling efficiency by devices, both decode models' own saturation (fig. 7)."""
    names, sizes = (list(rows[column].unique()) for column in ("scheduler", "size"))
    style = _by_scheduler(names) | _LINES | {"err_kws": {"linewidth": 1}}
    fig, axes = _own_panels(rows, "size", (TPS, hs.EFFICIENCY), (10, 5.4), **style)
    for bottom in axes[1]:
        bottom.set(xlabel="devices", xticks=sizes)
        bottom.axhline(100, color="#333333", linestyle=":", linewidth=1)
    for left in axes[:, 0]:
        left.set_ylim(0, None)
    axes[0, 0].yaxis.set_major_formatter("{x:,.0f}")
    figures.shared_legend(fig)
    return fig


def _own_panels(
    rows: pd.DataFrame, x: str, metrics: Sequence[str], figsize: tuple[float, float], **style: Any
) -> tuple[Figure, Any]:
    """A column for each decode model at its own saturation, a row per metric."""
    fig, axes = plt.subplots(len(metrics), 2, figsize=figsize, sharex=True, sharey="row")
    for column, setting in zip(axes.T, _OWN, strict=True):
        for axis, metric in zip(column, metrics, strict=True):
            sns.pointplot(at(rows, setting), x=x, y=metric, **style, ax=axis)
            axis.set(xlabel="", ylabel=metric)
        column[0].set_title(setting[0].capitalize())
    return fig, axes


def mixes_figure(rows: pd.DataFrame) -> Figure:
    """SLO attainment and tokens per dollar of each composition, judged setting (fig. 8)."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    usd_per_h = {mix: cluster.cluster(devices).usd_per_h for mix, devices in hs.MIXES.items()}
    rows = at(rows, MAIN)
    rows = rows.assign(cost=rows[TPS] * 3600 / rows["mix"].map(usd_per_h) / 1e6)
    for axis, metric in zip(axes, (SLO, "cost"), strict=True):
        sns.pointplot(rows, x=metric, y="mix", **_by_scheduler(), **_APART, ax=axis)
        axis.set(ylabel="")
        axis.grid(visible=True)
    axes[0].set(xlabel=SLO, xlim=(0, 101), title="SLO attainment")
    axes[1].set(xlabel="tokens per $ [millions]", title="Cost efficiency")
    axes[1].set_xlim(left=0)
    figures.shared_legend(fig)
    return fig


def verdict_bars_figure(table: pd.DataFrame) -> Figure:
    """How many claims of :func:`survival_frame` hold in each setting."""
    colours = {
        "reproduced": "#0072B2",
        "direction only": "#56B4E9",
        "undecided": "#F0E442",
        "not reproduced": "#D9D9D9",
        "not a test": "#FFFFFF",
    }
    labels = [", ".join(setting) for setting in SETTINGS]
    fig, axis = plt.subplots(figsize=(8.4, 2.9))
    left = np.zeros(len(labels))
    for verdict, colour in colours.items():
        counts = np.array([(table[f"{label}: verdict"] == verdict).sum() for label in labels])
        axis.barh(labels, counts, left=left, color=colour, label=verdict, edgecolor="0.6")
        told = "white" if verdict == "reproduced" else "black"
        for y, (start, count) in enumerate(zip(left, counts, strict=True)):
            axis.text(start + count / 2, y, count or "", ha="center", va="center", color=told)
        left += counts
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="claims")
    fig.legend(loc="outside upper center", ncols=len(colours))
    return fig


def table1() -> dict[str, dict[str, float]]:
    """HeteroServe's Table 1 as published: metric, scheduler, value."""
    return {
        metric: {
            name: float(claims()[f"heteroserve-{k}-{row}"].published) for name, row in _ROWS.items()
        }
        for k, metric in enumerate((TPS, SLO, P95), start=1)
    }


def crossing(shares: list[float], gains: list[float]) -> float:
    """First share [%] at which a gain turns to a loss; 0 if it starts lost, 100 if never."""
    for (s0, g0), (s1, g1) in pairwise(zip(shares, gains, strict=True)):
        if g0 > 0 >= g1:
            return 100.0 * (s0 + (s1 - s0) * g0 / (g0 - g1))
    return 100.0 if gains[0] > 0 else 0.0


def over_uniform(rows: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """SLO attainment above Uniform's by share of long prompts; shape (shares, seeds)."""
    mine, uniform = (grid(rows, "share", SLO, scheduler=each) for each in (name, "Uniform"))
    return mine - uniform


def _change(rows: pd.DataFrame, name: str, metric: str) -> NDArray[np.float64]:
    """What a part of the ablation changes [%], by seed."""
    full = values(rows, metric, scheduler="full")
    return 100 * (values(rows, metric, scheduler=name) - full) / full


def headline_values(table1: pd.DataFrame, ablation: pd.DataFrame) -> dict[str, Value]:
    """Values of what HeteroServe's Table 1 and ablation claim, of rows of one setting."""
    whole = {
        metric: {name[0]: values(table1, metric, scheduler=name) for name in _ROWS}
        for metric in (TPS, SLO, P95, hs.TAIL)
    }
    tps, slo, p95, tail = whole.values()
    ranked = {metric: ranking(whole[metric]) for metric in (TPS, SLO, P95)}
    result: dict[str, Any] = {
        f"{k}-{row}": whole[metric][name[0]]
        for k, metric in enumerate((TPS, SLO, P95), start=1)
        for name, row in _ROWS.items()
    }
    attained = {name: values(ablation, SLO, scheduler=name) for name in ("full", _STATIC)}
    result |= {
        "4a": ranked[TPS],
        "4b": tps["H"] / tps["L"],
        "5": tps["H"] / tps["U"],
        "6": p95["U"] / p95["H"],
        "7a": attained["full"] - attained[_STATIC],
        "7b": _change(ablation, _STATIC, TPS),
        "20": ranked[SLO],
        "21a": ranked[P95],
        "21b": p95["H"] / p95["L"],
        "22a": tps["H"] / tps["O"],
        "22b": slo["H"] - slo["O"],
        "23a": 100.0 * of_means(tps["L"] - tps["U"], tps["H"] - tps["U"]),
        "23b": 100.0 * of_means(slo["L"] - slo["U"], slo["H"] - slo["U"]),
        "24a": 100 * (tps["H"] / tps["L"] - 1),
        "24b": slo["H"] - slo["L"],
        "24c": p95["H"] - p95["L"],
        "25": tps["O"] / tps["U"],
        "31a": tail["H"],
        "31b": tail["U"],
        "31c": tail["C"],
    }
    return {f"heteroserve-{number}": value for number, value in result.items()}


def claim_values(setting: Setting, runs: Mapping[str, pd.DataFrame]) -> dict[str, Value]:
    """Value of every claim in one setting.

    Parameters
    ----------
    runs
        Tables of :class:`~pipelines.studies.heteroserve.Study`: ``table1``, ``ablation``,
        ``loads`` by ``factor``, ``workloads`` by ``workload``, ``shares`` by ``share``,
        ``sweeps``, ``sizes``, ``mixes`` by ``mix``.
    """
    here = {name: at(rows, setting) for name, rows in runs.items()}

    def of(name: str, metric: str, scheduler: str, **where: object) -> NDArray[np.float64]:
        return values(here[name], metric, scheduler=scheduler, **where)

    def swept(name: str, value: float, metric: str) -> NDArray[np.float64]:
        return values(here["sweeps"], metric, swept=name, value=value)

    result: dict[str, Any] = {
        "8": of("ablation", SLO, "full") - of("ablation", SLO, "no length binning"),
        "9": _change(here["ablation"], "no memory penalty", TPS),
        "26": _change(here["ablation"], "no length binning", P95),
    }
    up_to = here["loads"][here["loads"]["factor"] <= 1.5]
    h2, u2 = (of("loads", SLO, name, factor=2.0) for name in ("HeteroServe", "Uniform"))
    result |= {
        "10a": np.min(grid(up_to, "factor", SLO, scheduler="HeteroServe"), axis=0),
        "10b": h2,
        "10c": u2,
        "10d": h2 - u2,
    }
    (slo_h, slo_u), (tps_h, tps_u) = (
        [of("workloads", metric, name, workload="bimodal") for name in ("HeteroServe", "Uniform")]
        for metric in (SLO, TPS)
    )
    long = [of("workloads", P95, name, workload="mean 2,048") for name in _ROWS]
    shares = here["shares"]
    gains = over_uniform(shares, "HeteroServe").mean(axis=1).tolist()
    result |= {
        "11a": slo_h - slo_u,
        "11b": tps_h / tps_u,
        "29": np.min(long, axis=0),
        "30": crossing(shares["share"].unique().tolist(), gains),
    }
    by_bins = here["sweeps"][here["sweeps"]["swept"] == "K"]
    bins = {metric: grid(by_bins, "value", metric) for metric in (TPS, SLO, P95)}
    for letter, metric in (("a", SLO), ("b", P95)):
        apart = max(abs(a - b) for a, b in combinations([v.mean() for v in bins[metric]], 2))
        noise = min(v.std(ddof=1) for v in bins[metric])
        result[f"27{letter}"] = 0.0 if apart == 0 else float(apart / noise)
    base = {metric: swept("delta", 0.1, metric) for metric in (hs.P99, TPS)}
    sizes = here["sizes"]
    by_size = grid(sizes, "size", TPS, scheduler="HeteroServe")
    largest = sizes[sizes["size"] == sizes["size"].max()]
    efficiency = {
        name[0]: values(largest, hs.EFFICIENCY, scheduler=name)
        for name in ("Uniform", "HeteroServe")
    }
    strictest = here["sweeps"].query("swept == 'Q_max'")["value"].min()
    result |= {
        "12": 100 * np.ptp(bins[TPS], axis=0) / np.mean(bins[TPS], axis=0),
        "13a": 100 * (swept("delta", 0.05, hs.P99) / base[hs.P99] - 1),
        "13b": 100 * (swept("delta", 0.15, TPS) / base[TPS] - 1),
        "14": ranking({f"{value:.1f}": swept("lambda", value, hs.COV) for value in (2.0, 4.0)}),
        "15": np.array(
            [np.corrcoef(sizes["size"].unique(), each)[0, 1] ** 2 for each in by_size.T]
        ),
        "19": np.ptp(grid(here["mixes"], "mix", SLO, scheduler="HeteroServe"), axis=0),
        "28": ranking(efficiency),
        "32": swept("Q_max", strictest, hs.PASSED) - swept("Q_max", 32.0, hs.PASSED),
    }
    told = {f"heteroserve-{number}": value for number, value in result.items()}
    return headline_values(here["table1"], here["ablation"]) | told


def of_means(over: NDArray[np.float64], under: NDArray[np.float64]) -> NDArray[np.float64]:
    r"""Ratio of two means over seeds, as a value per seed that has the jackknife's spread.

    .. math:: \hat\theta + (n - 1) (\overline{\theta_{-j}} - \theta_{-i}), \quad
        \theta_{-i} = \sum_{j \ne i} a_j / \sum_{j \ne i} b_j

    Single seeds can bring the divisor close to 0. Source: Tukey (1958).

    Examples
    --------
    >>> of_means(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])).tolist()
    [0.5, 0.5, 0.5]
    """
    left_out = (over.sum() - over) / (under.sum() - under)
    values: NDArray[np.float64] = (len(over) - 1) * (left_out.mean() - left_out)
    return values + float(over.mean() / under.mean())


def mean(value: Value) -> float | str:
    """Mean over seeds, or the order."""
    return value if isinstance(value, str) else float(np.mean(value))


def _text(value: Value) -> str:
    return value if isinstance(value, str) else f"{np.mean(value):.4g}"


def _judged(name: str, value: Value, draws: int) -> str:
    """Verdict that a value of a claim has by itself, ``undecided`` where it is 0 over 0."""
    if not isinstance(value, str) and not np.isfinite(value).all():
        return "undecided"  # a share of a gain, where nobody meets the target
    claim, ends = claims()[name], interval(value) if isinstance(value, np.ndarray) else None
    return "not a test" if claim.not_a_test else claim.judge(mean(value), ends, draws)


def window_frame(
    by_setting: Mapping[Setting, Mapping[str, Value]], window: Mapping[str, pd.DataFrame]
) -> pd.DataFrame:
    """Claims that the printed window judges otherwise than the whole run, by setting.

    Parameters
    ----------
    window
        Tables of :meth:`Study.windowed`: ``table1``, ``ablation``.
    """
    rows = []
    for setting, whole in by_setting.items():
        found = headline_values(*(at(window[key], setting) for key in ("table1", "ablation")))
        for name, value in found.items():
            both = (whole[name], value)
            told = [_judged(name, one, np.size(whole["heteroserve-5"])) for one in both]
            if told[0] != told[1]:
                row = [name, claims()[name].published, ", ".join(setting)]
                rows.append([*row, _text(both[0]), told[0], _text(value), told[1]])
    columns = ["claim", "published", "setting", "whole run", "verdict", "window", "its verdict"]
    return pd.DataFrame(rows, columns=columns)


def survival_frame(by_setting: Mapping[Setting, Mapping[str, Value]]) -> pd.DataFrame:
    """Every claim with its value and verdict under every setting, and how many reproduce it."""
    rows, draws = [], max(np.size(value) for value in by_setting[MAIN].values())
    for name in by_setting[MAIN]:
        claim = claims()[name]
        row: dict[str, object] = {"claim": name, "about": claim.claim, "published": claim.published}
        for setting in SETTINGS:
            value, label = by_setting[setting][name], ", ".join(setting)
            row |= {label: _text(value), f"{label}: verdict": _judged(name, value, draws)}
        row["reproduced in"] = list(row.values()).count("reproduced")
        rows.append(row)
    return pd.DataFrame(rows)


def elsewhere(
    name: str, by_setting: Mapping[Setting, Mapping[str, Value]], window: pd.DataFrame
) -> str:
    """The other three settings in a sentence, and the rows of :func:`window_frame` in another."""
    a, b, c = (_text(by_setting[setting][name]) for setting in SETTINGS[1:])
    here = window[(window["claim"] == name) & (window["setting"] == ", ".join(MAIN))]
    told = (f" In the printed window {x} ({y})." for x, y in here.to_numpy()[:, -2:])
    return (
        f"Decode by batch and KV cache (4.1), at its own saturation; at 49.8 requests/s {a}; "
        f"weights only: {b} at its own saturation, {c} at 49.8 requests/s.{''.join(told)}"
    )


def reasons(
    study: hs.Study,
    latency_aware: hs.Scheduler,
    runs: Mapping[str, pd.DataFrame],
    windowed: pd.DataFrame,
) -> dict[str, str]:
    """What explains each claim in the recorded setting, by the claim's id.

    Parameters
    ----------
    windowed
        Rows of :meth:`Study.windowed`.
    """
    here = {name: at(rows, MAIN) for name, rows in runs.items()}

    def part(name: str, metric: str) -> float:
        return float(values(here["ablation"], metric, scheduler=name).mean())

    by_bins = here["sweeps"].query("swept == 'K, long to H100'").groupby("value")[SLO].mean()
    told_bins = " / ".join(f"{v:.1f}" for v in by_bins)
    told = over_uniform(here["shares"], "HeteroServe, long to H100").mean(axis=1)
    told_oracle = values(here["table1"], SLO, scheduler="Oracle, long to H100").mean()
    others = ("eq. 5 off, Q_max kept", "proportional, no queue-awareness")
    points = [part("full", SLO) - part(name, SLO) for name in others]
    percent = [100 * (part(name, TPS) / part("full", TPS) - 1) for name in others]
    static = (
        "Static weights and unbounded queues (4.3). With the test against Q_max kept {:.1f}, with "
        "weights read as shares {:.1f} {}. "
    )
    ours, latency = (study.saturated_rps(MAIN[0], one) for one in (hs.RATED, latency_aware))
    tps = at(windowed, MAIN).groupby("scheduler")[TPS].mean()
    empty = (
        "Eq. 4 as printed admits every bin everywhere (4,685 tokens fit on any device), so bins do "
        "nothing. "
    )
    noisy = "At load factor 1.0 a queue grows or not by chance of the seed. "
    saturating = (
        f"HeteroServe saturates at {ours:.1f}, Latency-Aware at {latency:.1f} requests/s, so at "
        "the former's rate the latter overflows. "
    )
    exclusive = (
        "Shares by compute as in 4.1; with long prompts on the H100s alone (4.2) the Oracle meets "
        f"the target for {told_oracle:.1f} %. "
    )
    whole = "Whole run, from the first arrival to the last token. "

    def draining(name: str, other: str) -> str:
        return (
            f"{whole}Much of the gap is the time after the last arrival, when the slow devices "
            "that fixed shares overload finish alone; in the printed window the ratio is "
            f"{tps[name] / tps[other]:.2f}. "
        )

    by_number = {
        "1": f"Decode decides: the cluster saturates at {ours:.1f} requests/s here, and at "
        f"{study.saturated_rps(hs.WEIGHTS_ONLY[0]):.1f} where a decode step reads no KV cache. ",
        "2-oracle": exclusive,
        "3": whole,
        "3-heteroserve": whole + noisy,
        "5": draining("HeteroServe", "Uniform"),
        "6": whole,
        "7a": static.format(*points, "points"),
        "7b": static.format(*percent, "%"),
        "8": f"{empty}With long prompts on the H100s alone attainment is "
        f"{part('long to H100', SLO):.1f} %. ",
        "9": f"Evictions per run at 0.9 of the own saturation: {part('full', 'evictions'):.1f}; "
        "after the first the two runs differ by chance. ",
        "10": "Beyond saturation queues grow as long as requests come, whoever routes. ",
        "11a": "Eq. 4 as printed; 4.4's explanation needs long prompts on the H100s alone. ",
        "12": f"{empty}With long prompts on the H100s alone attainment is {told_bins} %. ",
        "13": "The engine's reservation of prompt plus 90th percentile fills the memory before "
        f"the batch limit of eq. 6 does, so delta matters little. {noisy}",
        "14": "Variation over time of the unfinished requests per device. ",
        "19": "The paper names no mixes; assumed ones. Each at its own saturation, where "
        "attainment varies by chance. ",
        "20": saturating + exclusive,
        "22a": draining("HeteroServe", "Oracle"),
        "22b": exclusive,
        "25": draining("Oracle", "Uniform"),
        "28": "The smallest batch limit costs Uniform the same share at any size of the same "
        "ratio. ",
        "29": "Queueing: by Table 4 the prefill of 2,048 tokens takes 65 to 205 ms. ",
        "30": "Gain over Uniform with long prompts on the H100s alone: "
        f"{told.min():.0f} to {told.max():.0f} points. ",
        "31a": noisy,
        "32": "Best device read as an H100. ",
        **dict.fromkeys(("2-latency", "4b", "21b", "23b", "24"), saturating),
        **dict.fromkeys(("26", "27"), empty),
    }

    def reason(number: str) -> str:
        """Of the claim itself, of all its letters, or of its whole number."""
        names = (number, number.rstrip("abcd"), number.split("-")[0])
        return next((by_number[key] for key in names if key in by_number), "")

    return {name: reason(name.removeprefix("heteroserve-")) for name in claims()}


def flips_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Table 3: the smallest error that flips HeteroServe's rank, against two rivals per metric.

    As printed, throughput is divided by the rival's, the others by the sum; symmetric by the sum.
    """

    def symmetric(a: float, b: float) -> float:
        return 100.0 * abs(a - b) / (a + b)

    lines = []
    for metric, rival in ((TPS, "Oracle"), (SLO, "Capacity-prop."), (P95, "Capacity-prop.")):
        ours = at(rows, MAIN).groupby("scheduler")[metric].mean()
        mine = ours["HeteroServe"]
        h = table1()[metric]["HeteroServe"]
        for other in (rival, "Latency-Aware"):
            b = table1()[metric][other]
            lines.append(
                {
                    "metric": metric,
                    "rival": other,
                    "as printed [%]": 100.0 * (h / b - 1) if metric == TPS else symmetric(h, b),
                    "symmetric [%]": symmetric(h, b),
                    "symmetric, measured here [%]": symmetric(mine, ours[other]),
                    "HeteroServe ahead here": bool((mine < ours[other]) == (metric == P95)),
                }
            )
    return pd.DataFrame(lines)
