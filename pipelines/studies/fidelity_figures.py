"""How far simulations and step times can be trusted: runs judged and drawn beside measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hetero.deployment import Deployment
from hetero.plots.figures import CYCLE, gpu_colour, shared_legend
from hetero.routers import Builtin, Oracle, Router
from hetero.simulator import metrics, simulate
from hetero.simulator.uncertainty import Outcomes
from hetero.workload import Trace
from pipelines.studies import calibration
from pipelines.studies.replays import PERCENTILES, ReplayedRun

_GPUS: Final = {"a100": "A100", "l4": "L4", "t4": "T4"}


def judge(
    trace: Trace, router: Router | Builtin, seed: int
) -> Callable[[Deployment], dict[str, float]]:
    """Throughput, P95 TTFT and cost of any deployment that serves a trace with a router."""

    def evaluate(deployment: Deployment) -> dict[str, float]:
        run = simulate(deployment, trace, router, predictor=Oracle(), seed=seed)
        # Until four of five requests are done: the rest waits for the slowest device alone.
        until_s = float(np.quantile(run.requests["finish_s"], 0.8) - trace.arrival_s[0])
        loaded = metrics(run, until_s=until_s)
        return {
            "throughput [tokens/s]": loaded.total_tps,
            "P95 TTFT [s]": metrics(run).percentiles["ttft_s"][95],
            "cost [$/Mtok]": np.nan if loaded.usd_per_mtok is None else loaded.usd_per_mtok,
        }

    return evaluate


def public_figure(runs: pd.DataFrame) -> Figure:
    """Median error of published runs by GPU and engine, dense models and mixtures apart.

    Open marks are of rows to which something was fitted.

    Parameters
    ----------
    runs
        As :func:`pipelines.studies.calibration.published_frame` has them; rows of one GPU, engine
        and kind are joined by their medians, each weighted by its runs.
    """
    mixture = runs["llm"].isin(calibration.read("expert_servers")["llm"])
    frame = runs.assign(
        place=runs["gpu"] + ", " + runs["engine"] + mixture.map({True: ", experts", False: ""})
    )
    labels = {"throughput": "o", "TPOT": "s", "TTFT": "^"}
    rows = {
        place: {name: _weighted(part[name], part["runs"]) for name in labels}
        | {
            "runs": part["runs"].sum(),
            "floor": part["floor"].max(),
            "fitted": part["fitted"].ne("nothing").any(),
        }
        for place, part in frame.groupby("place")
    }
    shown = pd.DataFrame(rows).T.sort_values("throughput", ascending=False)
    places = np.arange(len(shown))
    colours = iter(CYCLE)
    fig, axis = plt.subplots(figsize=(7.6, 1.4 + 0.24 * len(shown)))
    for name, mark in labels.items():
        values, colour = shown[name].astype(float), next(colours)
        for fitted, fill in ((False, "full"), (True, "none")):
            here = (shown["fitted"] == fitted).to_numpy()
            label = None if fitted else name
            looks: dict[str, Any] = {"color": colour, "fillstyle": fill, "label": label}
            axis.plot(values[here], places[here], mark, markersize=5, **looks)
    axis.plot(
        shown["floor"].astype(float),
        places,
        "|",
        color="#111111",
        label="between repeats",
        markersize=9,
    )
    axis.set(
        yticks=places,
        yticklabels=[f"{place} ({int(count)})" for place, count in shown["runs"].items()],
        xscale="log",
        xlabel="median error of the default command [%]",
        ylabel="GPU, engine (runs)",
    )
    shared_legend(fig)
    return fig


def _weighted(values: pd.Series, weights: pd.Series) -> float:
    """Median of medians, each counted as often as it has runs; NaN without any."""
    kept = values.notna()
    if not kept.any():
        return float("nan")
    return float(np.median(np.repeat(values[kept], weights[kept])))


def engine_figure(runs: Mapping[tuple[str, str], ReplayedRun]) -> Figure:
    """Latencies of real runs, by name and kind of step times; ``ragged`` ones have a row each."""
    labels = {"ttft_s": "TTFT [s]", "tpot_s": "TPOT [ms]", "e2e_s": "E2E [s]"}
    names = [name for name, batches in runs if batches == "ragged"]
    fig, axes = plt.subplots(len(names), 3, figsize=(9.0, 2.7 * len(names)), squeeze=False)
    for row, name in zip(axes, names, strict=True):
        replay, other = runs[name, "ragged"], runs.get((name, "ragged, other host"))
        colour = gpu_colour(replay.real.gpu)
        curves: list[tuple[Any, dict[str, Any]]] = [
            (replay.simulated, {"color": colour, "label": "simulated"})
        ]
        if other is not None:
            label = "simulated, all-reduce of another host"
            curves.append((other.simulated, {"color": colour, "linestyle": ":", "label": label}))
        if replay.real.requests:
            curves.append(
                (replay.real.requests, {"color": "black", "linewidth": 0.8, "alpha": 0.6})
            )
        for ax, (quantity, label) in zip(row, labels.items(), strict=True):
            unit = 1e3 if quantity == "tpot_s" else 1.0
            measured = unit * replay.real.percentiles[quantity]
            ax.plot(measured, np.array(PERCENTILES) / 100, "o", color="black", label="measured")
            for latencies, style in curves:
                sns.ecdfplot(x=unit * latencies[quantity], **style, ax=ax)
            ax.set(xlabel=label, ylabel="", ylim=(0, 1))
            ax.set_xlim(0, None)
        row[0].set_ylabel("share of requests")
        row[0].set_title(name.replace("RTX-PRO-6000-Server", "RTX PRO 6000"), fontsize=9)
    shared_legend(fig)
    return fig


def ranges_figure(errors: pd.DataFrame) -> Figure:
    """Mean size of errors (bars) and its 95th percentile (marks) by ``batches`` and ``lengths``."""
    errors = errors.assign(size=errors["error_percent"].abs())
    labels = {"batches": "requests in the batch", "lengths": "tokens per request"}
    fig, axes = plt.subplots(2, 2, figsize=(8.8, 5.4), sharey=True)
    for row, (axis, label) in zip(axes, labels.items(), strict=True):
        for ax, phase in zip(row, ("prefill", "decode"), strict=True):
            part = errors[errors["phase"] == phase]
            part = part.assign(**{axis: part[axis].cat.remove_unused_categories()})
            bars = {"x": axis, "y": "size", "hue": "model", "hue_order": ("affine", "roofline")}
            sns.barplot(part, **bars, saturation=1, errorbar=None, ax=ax)
            sns.pointplot(
                part, **bars, estimator=lambda sizes: sizes.quantile(0.95), errorbar=None,
                dodge=0.4, linestyle="none", marker="_", markersize=9, palette=["black", "black"],
                legend=False, ax=ax,
            )  # fmt: skip
            ax.set(xlabel=label, ylabel="error [%]", title=phase)
            ax.get_legend().remove()
    axes[0, 0].legend(loc="upper left")
    return fig


def prototype_figure(errors: pd.DataFrame) -> Figure:
    """Simulated over measured values of Helix's prototype, with a band of 20 % either way."""
    labels = {
        "decode_tps": "decode throughput [tokens/s]",
        "prompt_s": "mean prompt latency [s]",
        "decode_s": "mean decode latency [s]",
    }
    shades = {kind: gpu_colour(kind) for kind in _GPUS.values()} | {"all types": "#777777"}
    fig, axes = plt.subplots(1, 3, figsize=(9.0, 3.4))
    for ax, (quantity, label) in zip(axes, labels.items(), strict=True):
        part = errors[errors["quantity"] == quantity]
        kinds = part["part"].str.rsplit("_", n=1).str[-1].map(_GPUS).fillna("all types")
        sns.scatterplot(
            part, x="measured", y="simulated", hue=kinds, palette=shades, style="mode",
            style_order=["online", "offline"], markers=["o", "s"], s=22, linewidth=0, ax=ax,
        )  # fmt: skip
        ends = np.array([part["measured"].min() * 0.7, part["measured"].max() * 1.4])
        ax.plot(ends, ends, color="black", linewidth=0.8)
        ax.fill_between(ends, 0.8 * ends, 1.2 * ends, color="black", alpha=0.08, linewidth=0)
        ax.set(xscale="log", yscale="log", xlabel=f"measured {label}")
    axes[0].set_ylabel("simulated")
    shared_legend(fig)
    return fig


def intervals_figure(outcomes: Sequence[Outcomes], colours: Mapping[str, str]) -> Figure:
    """Nominal values and intervals of 90 %, a row per set of plans; grey without a colour."""
    measures = outcomes[0].measures
    fig, axes = plt.subplots(len(outcomes), len(measures), figsize=(9.0, 4.6), squeeze=False)
    for row, outcome in zip(axes, outcomes, strict=True):
        for k, (ax, measure) in enumerate(zip(row, measures, strict=True)):
            for y, name in enumerate(outcome.names):
                colour = colours.get(name, "#555555")
                low, high = outcome.interval(name, measure)
                ax.plot([low, high], [y, y], color=colour, linewidth=4, alpha=0.5)
                ax.plot(outcome.nominal[y, k], y, "o", color=colour)
            ax.set_yticks(range(len(outcome.names)), outcome.names if ax is row[0] else [])
            ax.set(xlabel=measure, ylim=(-0.6, len(outcome.names) - 0.4))
            drawn = outcome.values[:, :, k]
            if drawn.max() > 50 * drawn.min():
                ax.set_xscale("log")
            else:
                ax.set_xlim(0, None)
                ax.xaxis.set_major_locator(MaxNLocator(4))
                ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
            ax.invert_yaxis()
    axes[0, 0].plot([], [], "o", color="#555555", label="nominal step times")
    axes[0, 0].plot([], [], color="#555555", linewidth=4, alpha=0.5, label="90 % interval")
    shared_legend(fig)
    return fig
