"""Pictures of what commands answer: plans over a day and of islands, and simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.errors import DataError, ParameterError
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.rates import PHASES
from hetero.plots import figures
from hetero.simulator import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hetero.apps.capacity.curve import DayPlan

POINTS = 240
"""Samples along a run."""


def day(plan: DayPlan) -> Figure:
    """GPUs kept the whole day (full) and rented by the hour (hatched), the load below.

    Parameters
    ----------
    plan
        What :func:`hetero.apps.capacity.curve.day` found.
    """
    rates = np.asarray(plan.curve.rates_rps)
    hours = np.arange(len(rates) + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7.0, 4.6), height_ratios=(2.2, 1.0)
    )
    base = np.zeros(len(rates))
    for reserved in (True, False):
        each = [plan.gpus(hour, reserved=reserved) for hour in range(len(rates))]
        for name in dict.fromkeys(name for one in each for name in one):
            count = np.array([one.get(name, 0) for one in each], np.float64)
            top.stairs(
                base + count, hours, baseline=base, fill=True, facecolor=figures.gpu_colour(name),
                edgecolor="white", hatch=None if reserved else "////", linewidth=0.0,
                label=f"{name}, {'all day' if reserved else 'by the hour'}",
            )  # fmt: skip
            base = base + count
    top.set_title(f"{plan.market.llm.name}: {plan.usd:.2f} $ over {len(rates)} hours")
    top.set(ylabel="GPUs", ylim=(0, base.max() * 1.05))
    top.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    bottom.stairs(rates, hours, color="#333333", linewidth=1.6, baseline=None)
    bottom.set(
        ylabel="load [requests/s]", xlabel="hour", ylim=(0, rates.max() * 1.1),
        xlim=(0, len(rates)), xticks=hours[:: 3 if len(rates) > 12 else 1],
    )  # fmt: skip
    figure.align_ylabels()
    return figure


def islands(plan: Assignment) -> Figure:
    """Share of the requests of each length that each group of islands serves, per phase.

    One colour per GPU type; groups of the same type are parted by white lines and named where
    there is room.
    """
    ranges = plan.rates.ranges
    width = (ranges.end_tokens - ranges.start_tokens).astype(np.float64)
    fig, axes = plt.subplots(2, 1, figsize=(7.5, 5.0), sharex=True)
    seen: dict[str, None] = {}
    for axis, phase in zip(axes, PHASES, strict=True):
        flow = plan.flow_rps(phase)
        share = 100 * flow / np.maximum(flow.sum(axis=0), 1e-12)
        groups = plan.of(phase)
        base = np.zeros(len(width))
        for g in sorted(range(len(groups)), key=lambda g: (groups[g].island, g)):
            island = groups[g].island
            seen[island.gpu] = None
            axis.bar(
                ranges.start_tokens, share[g], width=width, align="edge", bottom=base,
                color=figures.gpu_colour(island.gpu), edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            _name(axis, f"{groups[g].count} x {island.size}", share[g], base, ranges.start_tokens)
            base = base + share[g]
        axis.set(ylabel=f"{phase}\nshare of requests [%]", ylim=(0, 100))
        axis.grid(visible=False)
    axes[1].set_xlabel("input length [tokens]")
    fig.suptitle(
        f"{plan.served_rps:,.4g} requests/s, bound {plan.bound:,.4g}; "
        "labels: islands x GPUs of each",
        fontsize=9,
    )
    handles = [Patch(color=figures.gpu_colour(gpu), label=gpu) for gpu in seen]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(seen))
    return fig


def _name(axis: Axes, text: str, share: Floats, base: Floats, start: NDArray[np.int64]) -> None:
    """Label a group where its widest run of full bars is."""
    full = np.flatnonzero(share > 25.0)
    best = max(np.split(full, np.flatnonzero(np.diff(full) > 1) + 1), key=len)
    width = start[1] - start[0] if len(start) > 1 else 1
    if not len(best) or len(best) * width < 0.05 * (start[-1] - start[0]):
        return
    middle = best[len(best) // 2]
    axis.text(
        start[middle], base[middle] + share[middle] / 2, text, ha="center", va="center", fontsize=7,
        color="black", bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
    )  # fmt: skip


def timelines(folder: Path, runs: Sequence[tuple[str, Run]], about: str) -> list[Path]:
    """Write one figure per router and one of all; returns the paths without their endings."""
    figures.use_style()
    pictures = {
        folder / f"timeline_{name.lower().replace(' ', '_')}": timeline_figure(name, run)
        for name, run in runs
    } | {folder / "ttft": first_tokens_figure(runs)}
    for path, figure in pictures.items():
        figures.stamp(figure, about)
        try:
            figures.save(figure, path)
        except OSError as error:
            raise DataError(
                f"The figures cannot be written ({error}).",
                path=folder,
                resolve="choose a folder that may be written to.",
            ) from error
        figures.close(figure)
    return list(pictures)


def timeline_figure(name: str, run: Run) -> Figure:
    """Queue, KV use and share of time in steps of every replica, coloured by GPU type."""
    samples = run.samples
    if samples is None:
        raise ParameterError(
            "This run has no samples over time.", resolve="simulate it with sample_s."
        )
    figure, axes = plt.subplots(3, 1, figsize=(7.2, 5.6), sharex=True)
    spent_s = np.diff(samples.busy_s, axis=0, prepend=0.0)
    step_s = np.diff(samples.time_s, prepend=-np.inf)[:, None]
    panels = (
        (samples.waiting, "waiting [requests]"),
        (100 * samples.kv_use, "KV cache in use [%]"),
        (100 * spent_s / step_s, "time in steps [%]"),
    )
    for axis, (values, text) in zip(axes, panels, strict=True):
        for k, replica in enumerate(run.deployment.replicas):
            gpu = replica.gpu.name if replica.gpu else replica.name
            style = {"color": figures.gpu_colour(gpu), "linewidth": 0.9, "alpha": 0.8}
            axis.plot(samples.time_s, values[:, k], label=gpu, **style)
        axis.set(ylabel=text, ylim=(0, None))
    axes[0].set_title(name)
    axes[-1].set_xlabel("time [s]")
    figures.shared_legend(figure, "outside upper right", ncols=4)
    return figure


def first_tokens_figure(runs: Sequence[tuple[str, Run]]) -> Figure:
    """Distribution of the time to first token by router."""
    figure, axis = plt.subplots()
    for k, (name, run) in enumerate(runs):
        ttft_s = np.sort(run.ttft_s[np.isfinite(run.ttft_s)])
        share = 100 * np.arange(1, len(ttft_s) + 1) / max(len(run.ttft_s), 1)
        axis.plot(ttft_s, share, color=figures.CYCLE[k % len(figures.CYCLE)], label=name)
    axis.set(xscale="log", xlabel="time to first token [s]", ylabel="requests [%]", ylim=(0, 101))
    axis.legend()
    return figure
