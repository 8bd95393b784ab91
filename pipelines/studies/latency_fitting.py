"""Step times and their models: fits of published tables, compared and drawn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from hetero import latency
from hetero.catalog import gpu, llm
from hetero.latency import Measurements, frames
from hetero.latency.models.fitting import Prediction
from hetero.latency.models.floor import FloorFit
from hetero.latency.models.layers import HELIX_CONTEXT_TOKENS, LayerLatency
from hetero.latency.models.phase import PhaseFit
from hetero.plots.figures import gpu_colour, shared_legend

#: Fits of both phases by the label of the replica and the name of the form.
Fits = Mapping[tuple[str, str], tuple[PhaseFit | FloorFit, PhaseFit]]
PHASES: Final[tuple[Literal["prefill", "decode"], ...]] = ("prefill", "decode")
MEAN, LARGEST = "mean error [%]", "largest error [%]"


def fit_errors(fits: Fits) -> pd.DataFrame:
    """Errors of fits by replica, form and phase; a floor leaves the decodes as they are."""
    return pd.DataFrame(
        [
            (label, form, name, a.mape_percent, a.max_percent, a.r2, a.rows)
            for (label, form), pair in fits.items()
            for name, part in zip(PHASES, pair, strict=True)
            if not (form == "weighted, floor" and name == "decode")
            for a in (part.accuracy,)
        ],
        columns=["replica", "fit", "phase", MEAN, LARGEST, "R2", "rows"],
    )


def residuals_figure(
    tables: Sequence[Measurements], fits: Fits, panels: Iterable[tuple[str, int]]
) -> Figure:
    """Residuals over the size of the batch, cut at 75 %; a panel per form and phase (0 or 1)."""
    errors = fit_errors(fits).groupby(["phase", "fit"])[MEAN].mean()
    colours = {name: gpu_colour(name) for name in sorted({t.gpu for t in tables})}
    fig, axes = plt.subplots(2, 2, figsize=(8.6, 5.6), sharey=True)
    for ax, (form, k) in zip(axes.flat, panels, strict=True):
        parts = []
        for table in tables:
            if (table.label, form) in fits:
                rows = table.phase(PHASES[k])
                fitted = fits[table.label, form][k].predict(rows.batch, rows.length_tokens)
                size = rows.batch * rows.length_tokens if k == 0 else rows.batch
                off = np.clip(100 * (fitted.seconds / rows.seconds - 1), -75, 75)
                part = {"GPU": table.gpu, "model": table.llm, "size": size, "off": off}
                parts.append(pd.DataFrame(part))
        sns.scatterplot(
            pd.concat(parts), x="size", y="off", hue="GPU", palette=colours, style="model",
            style_order=["Llama-2-70B", "BLOOM-176B"], markers=["o", "s"], s=14, alpha=0.6,
            linewidth=0, rasterized=True, ax=ax,
        )  # fmt: skip
        error = f"mean error {errors[PHASES[k], form]:.1f} % ({len(parts)} replicas)"
        ax.set_title(f"{PHASES[k]}, {form}: {error}", fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_xlabel("tokens of the batch" if k == 0 else "requests decoding")
        ax.axhline(0, color="black", linewidth=0.8)
    for ax in axes[:, 0]:
        ax.set_ylabel("fit / measured - 1 [%]")
    shared_legend(fig, ncols=6)
    return fig


def intervals_figure(table: Measurements, fits: Fits) -> Figure:
    """Fits of a replica with their 95 % prediction intervals, prompts of up to 512 tokens."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    colour = gpu_colour(table.gpu)
    tokens = np.geomspace(128, 32768, 200)
    batch = np.maximum(1.0, tokens / 512)
    marks: dict[str, Any] = {"s": 14, "color": "black", "zorder": 3, "label": "measured"}
    for form, style in (("weighted", "-"), ("weighted, floor", "--")):
        band = fits[table.label, form][0].predict(batch, tokens / batch)
        _band(left, tokens, band, colour, style, label=form)
    rows = table.phase("prefill")
    left.scatter(rows.batch * rows.length_tokens, 1e3 * rows.seconds, **marks)
    left.set(xscale="log", yscale="log", xlabel="tokens of the batch", ylabel="prefill [ms]")
    left.set_ylim(20, 8000)
    left.legend()
    requests = np.arange(1, 65)
    band = fits[table.label, "weighted"][1].predict(requests, 576.0)
    _band(right, requests, band, colour, label="weighted", name="95 % prediction interval")
    rows = table.phase("decode")
    rows = rows.where(rows.length_tokens == 576)
    right.scatter(rows.batch, 1e3 * rows.seconds, **marks)
    right.set(xlabel="requests decoding, 576 tokens each", ylabel="decode step [ms]")
    right.set_ylim(0, None)
    right.legend(loc="lower right")
    fig.suptitle(f"{table.label}, {table.engine}", fontsize=10)
    return fig


def _band(
    axis: Axes, x: ArrayLike, fit: Prediction, colour: str, style: str = "-", *, label: str,
    name: str | None = None,
) -> None:  # fmt: skip
    """A fit [ms] as a line; its interval, down to 1 ms, as a band."""
    axis.plot(x, 1e3 * fit.seconds, style, color=colour, label=label)
    low, high = (1e3 * np.maximum(end, 1e-3) for end in (fit.low_s, fit.high_s))
    axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0, label=name)


def layers_figure(nodes: Iterable[LayerLatency]) -> Figure:
    """Time per layer over prompt tokens and decoding requests, measured and by the roofline."""
    fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.6))
    for node in sorted(nodes, key=lambda n: n.prompt_ms[-1] / n.prompt_tokens[-1], reverse=True):
        style = {"color": gpu_colour(node.gpu), "alpha": 1.0 / node.tensor_parallel**0.4}
        name = node.gpu + (f" x{node.tensor_parallel}" if node.tensor_parallel > 1 else "")
        spec = latency.for_gpu(
            gpu(node.gpu), llm(node.llm), node.tensor_parallel, source="helix", layers=1
        )
        n = np.linspace(250, node.prompt_tokens[-1], 200)
        b = np.arange(1, int(min(node.decode_requests[-1], 400)) + 1)
        axes[0].plot(n, spec.seconds(n) * 1e3, ":", linewidth=1.2, **style)
        axes[0].plot(n, node.prompt_layer_ms(n), label=name, **style)
        decoding = spec.seconds(b, b, b * HELIX_CONTEXT_TOKENS) * 1e3
        axes[1].plot(b, decoding, ":", linewidth=1.2, **style)
        axes[1].plot(b, node.decode_layer_ms(b), **style)
    axes[0].set(xscale="log", xlabel="prompt tokens", title="prompts")
    axes[1].set(xlabel="requests decoding", title="decodes")
    axes[0].set_xticks([250, 1000, 4000, 15000], ["250", "1,000", "4,000", "15,000"])
    axes[0].xaxis.set_minor_formatter("")
    for axis, ticks in zip(axes, ([2, 5, 10, 20, 50, 100, 200], [2, 5, 10, 20]), strict=True):
        axis.set(yscale="log", ylabel="time per layer [ms]")
        axis.set_yticks(ticks, [str(tick) for tick in ticks])
        axis.yaxis.set_minor_formatter("")
    axes[0].plot([], [], ":", color="black", linewidth=1.2, label="roofline")
    fig.legend(loc="outside right center")
    return fig


def compare_models(tables: Iterable[Measurements]) -> pd.DataFrame:
    """Errors of affine fit, calibrated roofline and step model on every replica.

    The step model's are those against the published grid, whatever ``tables`` were read from.
    """
    keys = ["gpu", "llm", "tensor_parallel", "engine"]
    steps = frames.derived_frame("aiconfigurator_steps").set_index(keys)
    rows = []
    for table in tables:
        spec = latency.for_gpu(
            gpu(table.gpu), llm(table.llm), table.tensor_parallel,
            source=f"aiconfigurator/{table.engine.split()[0]}",
        )  # fmt: skip
        roofline = table.accuracy(spec.step_model())
        step = steps.xs((table.gpu, table.llm, table.tensor_parallel, table.engine))
        for phase, fitted in zip(PHASES, latency.fit(table), strict=True):
            assert fitted is not None
            replica = (table.gpu, table.engine, table.label)
            pairs = (("affine", fitted.accuracy), ("roofline", roofline[phase]))
            rows += [(*replica, model, phase, a.mape_percent, a.max_percent) for model, a in pairs]
            errors = step[[f"{phase}_mean_error_percent", f"{phase}_max_error_percent"]]
            rows.append((*replica, "step model", phase, *errors))
    return pd.DataFrame(rows, columns=["gpu", "engine", "replica", "model", "phase", MEAN, LARGEST])


def models_figure(compared: pd.DataFrame) -> Figure:
    """Mean error of each model by GPU, a panel per phase."""
    names = sorted(compared["gpu"].unique())
    fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), sharey=True)
    for ax, phase in zip(axes, PHASES, strict=True):
        sns.barplot(
            compared[compared["phase"] == phase], x="gpu", y=MEAN, order=names, hue="model",
            hue_order=("affine", "roofline", "step model"), saturation=1, errorbar=None,
            legend=ax is axes[1], ax=ax,
        )  # fmt: skip
        for bars in ax.containers:
            ax.bar_label(bars, fmt="%.1f", fontsize=7)
        ax.set_xticks(range(len(names)), [n.split("-S")[0].replace("RTX-", "") for n in names])
        ax.set(xlabel="", title=phase)
    axes[0].set_ylabel(MEAN)
    axes[1].legend(loc="upper left", ncols=3)
    axes[0].set_ylim(0, 8.5)
    return fig


def roofline_figure(errors: pd.DataFrame, sources: Collection[str], limit: float = 35) -> Figure:
    """Mean error of the roofline by GPU and engine, with what was held out of its fit.

    Marks beyond ``limit`` [%] are drawn at it, with their value.
    """
    rank = errors["source"].map(list(sources).index)
    errors = errors.assign(rank=rank).sort_values(["rank", "gpu", "engine"])
    marks = {
        "held_out_llm_percent": ("o", "model held out"),
        "held_out_degree_percent": ("D", "tensor-parallel degree held out"),
    }
    fig, axes = plt.subplots(1, 2, figsize=(9.0, 6.6), sharey=True)
    for ax, phase in zip(axes, PHASES, strict=True):
        part = errors[errors["phase"] == phase]
        y = np.arange(len(part))
        ax.barh(y, part["mape_percent"], color=part["gpu"].map(gpu_colour), height=0.7)
        for column, (marker, _) in marks.items():
            value = part[column].to_numpy()
            ax.scatter(
                np.minimum(value, limit - 1), y, marker=marker, s=18, facecolors="white",
                edgecolors="black", linewidths=0.8, zorder=3,
            )  # fmt: skip
            for k in np.flatnonzero(value > limit):
                ax.annotate(
                    f"{value[k]:.0f} %", (limit - 1, y[k]), xytext=(-6, 0), fontsize=7,
                    textcoords="offset points", ha="right", va="center",
                )  # fmt: skip
        for k, value in zip(y, part["mape_percent"], strict=True):
            ax.text(limit + 0.4, k, f"{value:.1f}", va="center", fontsize=7.5)
        for k in np.flatnonzero(np.diff(part["rank"])):
            ax.axhline(k + 0.5, color="#777777", linewidth=0.8)
        ax.set(xlabel="mean error [%] (fitted: number at the right)", title=phase, xlim=(0, limit))
        ax.margins(y=0.01)
        ax.grid(axis="y", visible=False)
    names = (errors["gpu"] + ", " + errors["engine"])[errors["phase"] == "prefill"]
    axes[0].set_yticks(range(len(names)), names, fontsize=7.5)
    axes[0].invert_yaxis()
    hollow: dict[str, Any] = {"linestyle": "", "color": "black", "markerfacecolor": "white"}
    handles = [Line2D([], [], marker="s", linestyle="", color="#777777", label="fitted")]
    handles += [Line2D([], [], marker=m, label=label, **hollow) for m, label in marks.values()]
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    return fig
