"""The figure of a view: five panels that change with what is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from hetero.arrays import Floats
from hetero.plots import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hetero.apps.explorer.view import View
    from hetero.simulator import Run
    from hetero.simulator.run import Samples


_MET = figures.CYCLE[2]
_MISSED = figures.CYCLE[4]
_OFFERED = "#777777"
_LINES = 12  # more replicas of a GPU type are drawn as their mean and their range


def draw(view: View) -> Figure:
    """Latencies against targets, queue and KV use over time, throughput against the bound."""
    figures.use_style()
    # Fixed margins: fitting them to the text would take longer than the rest of the drawing.
    figure = plt.figure(figsize=(10.0, 5.6))
    figure.set_layout_engine("none")
    grid = figure.add_gridspec(
        2, 6, left=0.07, right=0.985, top=0.855, bottom=0.115, wspace=1.5, hspace=0.5
    )
    ttft, tpot, load = (figure.add_subplot(grid[0, k : k + 2]) for k in (0, 2, 4))
    queue, cache = (figure.add_subplot(grid[1, k : k + 3]) for k in (0, 3))
    run, samples = view.run, view.run.samples
    assert samples is not None
    _distribution(ttft, view, "ttft", 1.0, "time to first token [s]")
    _distribution(tpot, view, "tpot", 1e3, "time per output token [ms]")
    _throughput(load, view)
    _over_time(queue, run, samples, samples.waiting.astype(np.float64))
    queue.plot(samples.time_s, samples.held, color="black", linewidth=1.3, label="dispatcher")
    queue.set_ylabel("waiting [requests]")
    queue.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    queue.set_ylim(0, max(1.0, queue.get_ylim()[1]))
    _over_time(cache, run, samples, 100.0 * samples.kv_use)
    cache.set(ylabel="KV cache in use [%]", ylim=(0, 102))
    handles, labels = queue.get_legend_handles_labels()
    cache.legend(handles, labels, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=8,
                 columnspacing=1.0, handlelength=1.3)  # fmt: skip
    figure.text(0.012, 0.95, view.title, fontsize=10.5, fontweight="bold")
    return figure


def _distribution(axis: Axes, view: View, name: str, scale: float, label: str) -> None:
    """Share of the counted requests within a time, and where the target cuts it."""
    values = scale * getattr(view.run, f"{name}_s")[view.counted]
    target = getattr(view.slo, f"{name}_s")
    times = np.sort(values[np.isfinite(values)])
    axis.set(xlabel=label, ylabel="requests [%]", ylim=(0, 102))
    if not len(times):
        return
    rejected = np.count_nonzero(~view.run.finished[view.counted])
    share = 100.0 * np.arange(1, len(times) + 1) / (len(times) + rejected)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    low, high = float(np.quantile(times, 0.002)), float(times[-1])
    if target is None:
        axis.plot(times, share, color=figures.CYCLE[0], drawstyle="steps-post")
    else:
        target *= scale
        for part, colour in ((times <= target, _MET), (times > target, _MISSED)):
            axis.plot(times[part], share[part], color=colour, linewidth=2.0)
        axis.axvline(target, color="black", linewidth=0.9, linestyle="--")
        met = f"{100 * view.metrics.attainment[name]:.3g} % within {target:.3g}"
        axis.set_title(f"{met} {label[-3:].strip(' []')}", fontsize=9)
        low, high = min(low, target), max(high, target)
    axis.set_xlim(low / 1.25, high * 1.25)


def _throughput(axis: Axes, view: View) -> None:
    """Requests served, and served within all targets, over those offered; and the bound."""
    points = sorted((*view.curve, view.here), key=lambda point: point.offered_rps)
    offered = [point.offered_rps for point in points]
    bound = view.plan.bound_rps
    end = max(1.05 * offered[-1], 1.25 * (bound or 0.0))
    axis.plot([0, end], [0, end], color=_OFFERED, linewidth=0.9, linestyle=":", label="offered")
    if bound is not None:
        axis.axhline(bound, color="black", linewidth=0.9, linestyle="--", label="bound")
    axis.plot(offered, [p.served_rps for p in points], color=figures.CYCLE[0], label="served")
    axis.plot(offered, [p.met_rps for p in points], color=_MET, label="within targets")
    here = view.here
    axis.plot(here.offered_rps, here.served_rps, "o", color=figures.CYCLE[0], markersize=8)
    axis.plot(here.offered_rps, here.met_rps, "o", color=_MET, markersize=5)
    axis.set(xlabel="offered [requests/s]", ylabel="requests/s", xlim=(0, end), ylim=(0, None))
    axis.legend(loc="lower right", bbox_to_anchor=(1.03, 1.0), ncols=4, columnspacing=0.9,
                handlelength=1.3, borderaxespad=0.1)  # fmt: skip


def _over_time(axis: Axes, run: Run, samples: Samples, values: Floats) -> None:
    """One line per replica, coloured by GPU type; mean and range where there are many."""
    kinds: dict[str, list[int]] = {}
    for k, replica in enumerate(run.deployment.replicas):
        kinds.setdefault(replica.gpu.name if replica.gpu else replica.name, []).append(k)
    for name, members in kinds.items():
        colour, mine = figures.gpu_colour(name), values[:, members]
        label = f"{name} ({len(members)})" if len(members) > 1 else name
        if len(members) > _LINES:
            axis.fill_between(
                samples.time_s, mine.min(axis=1), mine.max(axis=1), color=colour, alpha=0.25,
                linewidth=0,
            )  # fmt: skip
            mine = mine.mean(axis=1, keepdims=True)
        for k in range(mine.shape[1]):
            axis.plot(
                samples.time_s, mine[:, k], color=colour, linewidth=1.0, alpha=0.85,
                label=label if k == 0 else None,
            )  # fmt: skip
    end = float(run.requests["arrival_s"][-1] - run.requests["arrival_s"][0])
    axis.axvline(end, color=_OFFERED, linewidth=0.9, linestyle=":")
    many = ", mean and range" if any(len(members) > _LINES for members in kinds.values()) else ""
    axis.set_xlabel(f"time [s] (dotted: last arrival){many}")
    axis.set_xlim(0, float(samples.time_s[-1]))
