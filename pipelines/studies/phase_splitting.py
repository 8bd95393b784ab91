"""Why phases are split: prices, batching and bandwidth by phase, and the ratio of replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from hetero import catalog
from hetero.catalog import Gpu
from hetero.cluster import Cluster, Machine
from hetero.costs.cost import IN_PAPERS, CostModel, PipelineStage
from hetero.costs.groups import Design, Group, design, group
from hetero.costs.pipeline import Pipeline
from hetero.errors import require
from hetero.intervals import interval, ranking
from hetero.planners.thunderserve.phases import PhasePlan
from hetero.plots import figures
from hetero.simulator import Run, Slo, metrics
from pipelines.studies.results import claim_rows

NAMES: Final = ("A100-SXM-80GB", "RTX-A6000", "RTX-A5000", "A40", "RTX-3090Ti")
READINGS: Final = {"printed": "thunderserve", "corrected": None}
"""Presets of GPU figures: as ThunderServe's Table 1 prints them, and those of the data sheets."""
SIZES: Final = (8, 12, 16)
TPS: Final = "throughput [tokens/s]"
_COLOURS: Final = {"coding": "#0072b2", "conversation": "#d55e00"}
_PRICES: Final = {phase: f"{phase} [$/10^6]" for phase in ("prefill", "decode")}


def gpus_of(reading: str) -> dict[str, Gpu]:
    """GPUs as ThunderServe's Table 1 prints them, or as their data sheets say."""
    return {name: catalog.gpu(name, preset=READINGS[reading]) for name in NAMES}


def table1_frame() -> pd.DataFrame:
    """Both readings of ThunderServe's Table 1, and the compute and bandwidth that a dollar buys."""
    rows = []
    for name in NAMES:
        row: dict[str, object] = {"GPU": name}
        for reading in READINGS:
            gpu = gpus_of(reading)[name]
            usd_per_h, tflops = gpu.usd_per_h or np.nan, gpu.peak_tflops("fp16")
            row |= {
                f"{reading} fp16 [TFLOPS]": tflops,
                f"{reading} bandwidth [GB/s]": gpu.mem_bw_gbs,
                f"{reading} TFLOPS per $/h": tflops / usd_per_h,
                f"{reading} GB/s per $/h": gpu.mem_bw_gbs / usd_per_h,
            }
        rows.append(row | {"memory [GiB]": gpu.mem_gib, "price [$/h]": gpu.usd_per_h})
    return pd.DataFrame(rows)


def _alone(gpu: Gpu) -> Pipeline:
    """LLaMA-7B on one GPU."""
    small = catalog.llm("LLaMA-1-7B")
    model = CostModel(Cluster("one", (Machine("one", gpu),)), small, IN_PAPERS)
    return model.pipeline([PipelineStage(0, 1, small.layers)])


def prices_frame() -> pd.DataFrame:
    """Price of both phases of a request, 512 in and 16 out, on one GPU (ThunderServe Fig. 1)."""
    rows = []
    for reading in READINGS:
        for name, gpu in gpus_of(reading).items():
            alone = _alone(gpu)
            each = [float(alone.decode_step_s(1, 512 + k)) for k in range(1, 16)]
            seconds = (float(alone.prefill_latency_s(512)), sum(each))
            usd_per_h = gpu.usd_per_h or np.nan
            rows.append((name, reading, *(1e6 * s * usd_per_h / 3600 for s in seconds)))
    return pd.DataFrame(rows, columns=["GPU", "figures", *_PRICES.values()])


def price_bars_figure(table: pd.DataFrame) -> Figure:
    """Prices by phase of all GPUs but the A100, printed ones hatched (ThunderServe Fig. 1)."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    shown = list(NAMES[1:])
    looks: dict[str, dict[str, Any]] = {"printed": {"alpha": 0.45, "hatch": "//"}, "corrected": {}}
    for axis, (phase, column) in zip(axes, _PRICES.items(), strict=True):
        for k, (reading, look) in enumerate(looks.items()):
            part = table[table["figures"] == reading].set_index("GPU").loc[shown]
            axis.bar(
                np.arange(len(shown)) + 0.4 * (k - 0.5), part[column], 0.38, edgecolor="white",
                color=[figures.gpu_colour(name) for name in shown], **{"alpha": 1.0} | look,
            )  # fmt: skip
        axis.set_xticks(range(len(shown)), [name.removeprefix("RTX-") for name in shown])
        axis.set_title(phase)
    axes[0].set_ylabel(r"price of a request [$10^{-6}$ \$]")
    labels = zip(looks.values(), ("as printed", "corrected"), strict=True)
    axes[1].legend(
        handles=[Rectangle((0, 0), 1, 1, color="0.5", label=x, **look) for look, x in labels]
    )
    return fig


def batching() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tokens per second on one A5000, by tokens or requests of a batch (ThunderServe Fig. 2).

    Prompts have up to 1,024 tokens, contexts 1,024; ``fits`` says whether the memory holds them.
    """
    alone = _alone(catalog.gpu("RTX-A5000"))
    tokens = np.array([128, 256, 512, 1024, 2048, 4096, 8192])
    pairs = tokens * np.minimum(tokens, 1024) / 2
    prefill = [
        n / float(alone.stage_seconds(n, 0.0, p)[0, 0]) for n, p in zip(tokens, pairs, strict=True)
    ]
    batches = np.array([1, 2, 4, 8, 16, 32])
    decode = batches / alone.decode_step_s(batches, 1024.0 * batches)
    fits = batches <= alone.decode_batch(1024)
    return (
        pd.DataFrame({"tokens": tokens, TPS: prefill}),
        pd.DataFrame({"requests": batches, TPS: decode, "fits": fits}),
    )


def batching_curves_figure(prefill: pd.DataFrame, decode: pd.DataFrame) -> Figure:
    """Throughput of prefill and decode over the batch (ThunderServe Fig. 2)."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    colour = figures.gpu_colour("RTX-A5000")
    axes[0].plot(prefill["tokens"], prefill[TPS], "o-", color=colour)
    axes[0].axvline(1024, color="0.6", linewidth=1)
    held = decode[decode["fits"]]
    axes[1].plot(held["requests"], held[TPS], "s-", color=colour, label="fits the memory")
    axes[1].plot(decode["requests"], decode[TPS], "s:", color=colour, alpha=0.5, label="beyond")
    for axis, table, phase in zip(axes, (prefill, decode), _PRICES, strict=True):
        unit = table.columns[0]
        axis.set(xscale="log", xlabel=f"{unit} in the batch", ylim=(0, None))
        axis.set_ylabel(f"{phase} [tokens/s]")
        axis.set_xticks(table[unit], [f"{n:,}" for n in table[unit]])
        axis.minorticks_off()
    axes[1].legend()
    return fig


def bandwidths_figure(clusters: Mapping[str, Cluster]) -> Figure:
    """Bandwidth between all GPUs that the cost model uses (ThunderServe Fig. 13), by title."""
    large = catalog.llm("LLaMA-1-30B")
    fig, axes = plt.subplots(1, len(clusters), figsize=(4 * len(clusters), 3.8))
    for axis, (name, fleet) in zip(axes, clusters.items(), strict=True):
        model = CostModel(fleet, large)
        counts = np.array([m.count for m in model.machines])
        where = np.repeat(np.arange(len(counts)), counts)
        matrix = model.bandwidth_gbs[np.ix_(where, where)]
        np.fill_diagonal(matrix, np.nan)
        figures.heat_map(
            pd.DataFrame(matrix), axis, cmap="viridis", norm=LogNorm(0.3, 300), linewidths=0,
            square=True, rasterized=True,
        )  # fmt: skip
        middle, names = np.cumsum(counts) - counts / 2, [m.name for m in model.machines]
        axis.set_xticks(middle, names, rotation=45, ha="right")
        axis.set_yticks(middle, names, rotation=0)
        axis.set_title(f"{name}, {len(where)} GPUs")
    ticks = [0.3, 1, 3, 10, 30, 100, 300]
    bar = fig.colorbar(axis.collections[0], ax=axes, label="bandwidth [GB/s]", ticks=ticks)
    bar.ax.set_yticklabels([str(tick) for tick in ticks])
    bar.ax.minorticks_off()
    return fig


def equal_groups(model: CostModel, gpus: int) -> list[Group]:
    """Every machine of a cluster divided into groups of so many GPUs.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> equal_groups(CostModel(cluster("thunderserve-a5000-8"), llm("LLaMA-1-13B")), 2)
    [((0, 2),), ((0, 2),), ((1, 2),), ((1, 2),)]
    """
    found = []
    for m, machine in enumerate(model.machines):
        require(
            gpus > 0 and machine.count % gpus == 0,
            f"Machine {machine.name} has {machine.count} GPUs, which groups of {gpus} cannot "
            "share out.",
            resolve=f"choose a size that divides {machine.count}.",
        )
        found += [group([(m, gpus)])] * (machine.count // gpus)
    return found


def divided(groups: list[Group], prefill: int) -> Design:
    """The first ``prefill`` groups prefill, the others decode."""
    require(
        0 < prefill < len(groups),
        f"{prefill} of {len(groups)} groups for prefill leave a phase with none.",
        resolve=f"choose 1 to {len(groups) - 1}.",
    )
    return design((one, "prefill" if k < prefill else "decode") for k, one in enumerate(groups))


def measured(run: Run, slo: Slo) -> dict[str, float]:
    """Throughput and attainment of all targets of a run (ThunderServe Fig. 6 and 14)."""
    seen = metrics(run, slo)
    return {
        TPS: seen.total_tps,
        "requests/s": seen.requests_per_s,
        "attainment [%]": 100 * seen.attainment["joint"],
    }


def divisions_frame(rows: pd.DataFrame, plans: Mapping[int, PhasePlan]) -> pd.DataFrame:
    """Rows of a comparison of ``plans`` by their prefill replicas, with what they estimate."""
    made = [plans[prefill] for prefill in rows["plan"]]
    added: dict[str, Any] = {
        "decode replicas": [len(one.decode) for one in made],
        "estimated [%]": [100 * one.value.attainment for one in made],
    }
    names = {"plan": "prefill replicas", "rate_rps": "rate [requests/s]"}
    return rows.rename(columns=names).assign(**added)


def read(fleet: Cluster, reading: str) -> Cluster:
    """A fleet with the GPU figures of one of :data:`READINGS`."""
    named = gpus_of(reading)
    return replace(fleet, machines=tuple(replace(m, gpu=named[m.gpu.name]) for m in fleet.machines))


def plan_table(
    plans: Mapping[tuple[str, int, str], PhasePlan], gpus: Collection[str]
) -> pd.DataFrame:
    """Plans by reading of ThunderServe's Table 1, stages and workload: GPUs on prefill [%]."""
    rows = []
    for key, made in plans.items():
        shares = (100 * made.gpu_share(gpu) for gpu in gpus)
        counts = len(made.prefill), len(made.decode)
        rows.append((*key, *counts, *shares, 100 * made.value.attainment))
    columns = ["figures", "stages", "workload", "prefill replicas", "decode replicas"]
    columns += [f"{gpu} on prefill [%]" for gpu in gpus]
    return pd.DataFrame(rows, columns=[*columns, "estimated attainment [%]"])


def means_frame(table: pd.DataFrame, keys: Sequence[str], *values: str) -> pd.DataFrame:
    """Means of the values by key and division of the replicas."""
    by = table.groupby([*keys, "prefill replicas", "decode replicas"], sort=False)
    return by[list(values)].mean().reset_index()


def throughput_curves_figure(table: pd.DataFrame) -> Figure:
    """Throughput over the division of the replicas, by number of GPUs (ThunderServe Fig. 6)."""
    fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axis, size in zip(axes, SIZES, strict=True):
        sns.lineplot(
            table[table["GPUs"] == size], x="prefill replicas", y=TPS, hue="workload",
            palette=_COLOURS, style="workload", markers=["o", "s"], dashes=False, errorbar=None,
            legend=axis is axes[0], ax=axis,
        )  # fmt: skip
        count = size // 2
        axis.set_xticks(range(1, count), [f"{p}:{count - p}" for p in range(1, count)])
        axis.set(title=f"{size} A5000", xlabel="prefill : decode replicas", ylim=(0, None))
        axis.set_ylabel(TPS if axis is axes[0] else "")
    axes[0].legend(title="")
    return fig


def attainment_curves_figure(table: pd.DataFrame) -> Figure:
    """Attainment over the division, simulated and estimated (dotted) (ThunderServe Fig. 14)."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    loads = table["load"].unique()
    shades = plt.get_cmap("viridis")(np.linspace(0.1, 0.8, len(loads)))
    for axis, name in zip(axes, table["workload"].unique(), strict=True):
        for shade, load in zip(shades, loads, strict=True):
            part = table[(table["workload"] == name) & (table["load"] == load)]
            at = part["prefill replicas"]
            axis.plot(at, part["attainment [%]"], "o-", color=shade, label=f"load {load:g}")
            axis.plot(at, part["estimated [%]"], "x:", color=shade)
        axis.set_xticks(range(1, 8), [f"{p}:{8 - p}" for p in range(1, 8)])
        axis.set(title=name, xlabel="prefill : decode replicas", ylim=(-2, 102))
    axes[0].set_ylabel("SLO attainment [%]")
    handles, labels = axes[0].get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.4", linestyle=":", marker="x"))
    fig.legend(handles, [*labels, "estimate of the planner"], loc="outside right upper")
    return fig


def cheapest(table: pd.DataFrame, reading: str, phase: str) -> list[str]:
    """GPUs by price of a phase, the cheapest first."""
    return list(table[table["figures"] == reading].sort_values(_PRICES[phase])["GPU"])


def conclusions_frame(priced: pd.DataFrame, planned: pd.DataFrame) -> pd.DataFrame:
    """Which of the paper's conclusions hold with either reading of ThunderServe's Table 1."""
    rows: dict[str, dict[str, bool]] = {}
    for reading in READINGS:
        prefill, decode = (cheapest(priced, reading, phase) for phase in _PRICES)
        part = planned[planned["figures"] == reading]
        both = part["prefill replicas"] + part["decode replicas"]
        share = part.assign(share=part["prefill replicas"] / both)
        share = share.pivot(index="stages", columns="workload", values="share")
        rows[reading] = {
            "A40 prefills cheaper than 3090Ti": prefill.index("A40") < prefill.index("RTX-3090Ti"),
            "A40 prefills cheapest of the rented GPUs": prefill[0] == "A40",
            "3090Ti decodes cheaper than A40": decode.index("RTX-3090Ti") < decode.index("A40"),
            "3090Ti decodes cheapest of the rented GPUs": decode[0] == "RTX-3090Ti",
            "plans put most A40 on prefill": bool((part["A40 on prefill [%]"] > 50).all()),
            "plans put most 3090Ti on decode": bool((part["RTX-3090Ti on prefill [%]"] < 50).all()),
            "coding plans have the larger share of prefill replicas": bool(
                (share["coding"] > share["conversation"]).all()
            ),
        }
    table = pd.DataFrame(rows).replace({True: "yes", False: "no"})
    return table.rename_axis("conclusion").reset_index()


def claims(
    priced: pd.DataFrame,
    prefill: pd.DataFrame,
    decode: pd.DataFrame,
    thrown: pd.DataFrame,
    attained: pd.DataFrame,
    slo_scale: float,
) -> list[dict[str, Any]]:
    """Claims 1, 2, 3 and 28; ``thrown`` is the throughput and ``attained`` the attainment by seed.

    The best division is that of the means over seeds; intervals and orders are of the best of each.
    """
    rows: list[dict[str, Any]] = []
    pair = priced[priced["GPU"].isin(["A40", "RTX-3090Ti"])]
    for number, phase in zip(("1a", "1b"), _PRICES, strict=True):
        both = ("<".join(cheapest(pair, one, phase)) for one in READINGS)
        printed, order = (one.replace("RTX-", "") for one in both)
        note = (
            f"LLaMA-7B, which the paper does not name; data-sheet figures, {printed} with those of "
            "Table 1. Over all GPUs of the table the A5000 is cheapest with data-sheet figures. "
        )
        rows += claim_rows("thunderserve", "fig1_prices", note, {number: order})
    by_tokens, by_requests = prefill.set_index("tokens")[TPS], decode.set_index("requests")[TPS]
    note = "One A5000, assumed; batch 8 of 1,024 tokens against batch 1. "
    gains = {"2a": by_tokens[8192] / by_tokens[1024], "2b": by_requests[8] / by_requests[1]}
    rows += claim_rows("thunderserve", "fig2_batching", note, gains)
    over_loads, each = _best(attained, "workload", "attainment [%]")
    told = ", ".join(f"{load:g}" for load in attained["load"].unique())
    note = (
        f"Mean over loads of {told} of what the best division sustains, targets at scale "
        f"{slo_scale:g}: the paper gives neither. "
    )
    for number, name in (("3a", "coding"), ("3b", "conversation")):
        most, worst = int(over_loads[name].idxmax()), 100 - over_loads[name].max()
        missed = f"{note}There {worst:.1f} % of the requests miss a target. "
        (row,) = claim_rows("thunderserve", "fig14_ratio", missed, {number: most})
        rows.append(row | ({"interval": interval(each[name])} if len(each[name]) > 1 else {}))
    rows += claim_rows("thunderserve", "fig14_ratio", note, {"3c": ranking(each)})
    for number, size in zip(("28a", "28b", "28c"), SIZES, strict=True):
        means, each = _best(thrown[thrown["GPUs"] == size], "workload", TPS)
        at = {name: int(means[name].idxmax()) for name in _COLOURS}
        ratios = ", ".join(f"{p}:{size // 2 - p} for {name}" for name, p in at.items())
        note = f"All requests at once, inputs and outputs counted; best at {ratios}. "
        rows += claim_rows("thunderserve", "fig6_ratio", note, {number: ranking(each)})
    return rows


def _best(table: pd.DataFrame, key: str, value: str) -> tuple[Any, dict[str, Any]]:
    """Means by key and division, and by key the prefill replicas of the best division per seed."""
    means = table.groupby([key, "prefill replicas"], sort=False)[value].mean()
    seeds = table.groupby([key, "seed", "prefill replicas"])[value].mean().unstack().idxmax(axis=1)
    return means, {name: seeds.loc[[name]].to_numpy() for name in _COLOURS}
