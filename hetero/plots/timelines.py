"""Figures of ``hetero simulate``: what the replicas hold over time, and times to first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from hetero.errors import DataError, ParameterError
from hetero.plots import figures
from hetero.simulator import Run

#: Samples along a run.
POINTS = 240


def draw(folder: Path, runs: Sequence[tuple[str, Run]], about: str) -> list[Path]:
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
