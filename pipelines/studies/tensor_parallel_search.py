"""Tensor-parallel degrees of Xiong et al. (section 5.1, Fig. 4): estimated, simulated and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hetero import catalog
from hetero.catalog import Link, Llm
from hetero.cluster import Cluster
from hetero.comparison import compare
from hetero.deployment import Engine
from hetero.engines import PAPERS, replicated, roofline_steps
from hetero.memory import KvFormula
from hetero.planners.xiong.tensor_parallel import DegreeSearch, roofline_source
from hetero.plots.figures import CYCLE, shared_legend
from hetero.routers import Builtin
from hetero.simulator import Run, metrics
from hetero.workload import Trace

#: Order of the degrees that the paper prints.
PUBLISHED: Final = "2>4>1>8"
TPS: Final = "throughput [tokens/s]"
#: vLLM 0.6.0, and beside it the default of later engines.
ENGINES: Final = {
    "prefill first": Engine(batching="prefill first", admission="paged", max_batch=256),
    "chunked": Engine(batching="chunked", admission="paged", max_batch=256, max_step_tokens=2048),
}
#: Engine and the KV formula of its cache by label: an engine stores what the model has, grouped
#: queries; eq. 2, 5 and 8 of Xiong et al., the planner's and the scheduler's, print 2 l h.
SETTINGS: Final[dict[str, tuple[Engine, KvFormula]]] = {
    **{name: (engine, "model") for name, engine in ENGINES.items()},
    "cache of 2 l h": (ENGINES["prefill first"], "full"),
}
_BARS: Final = {"x": "t", "hue": "series", "saturation": 1, "errorbar": None}
FORMULAS: Final[tuple[tuple[KvFormula, str], ...]] = (("full", "2 l h"), ("model", "grouped"))

#: :func:`hetero.planners.xiong.tensor_parallel.search` with its machine and model given: it takes a
#: sample of requests and a reading.
Search = Callable[..., DegreeSearch]


@cache
def links() -> dict[str, Link | None]:
    """Links of the machine with eight V100: the one printed, and that of the SXM2 module.

    With the first four GPUs serve no faster than one, which section 5.2 of Xiong et al. excludes:
    the second is the reading under which most of its figures come out, and is not judged.
    """
    return {"PCIe 3 (printed)": None, "NVLink 2": catalog.link("NVLink2")}


def stretched(trace: Trace, factor: int) -> Trace:
    """The same requests with inputs ``factor`` times as long."""
    return Trace(
        trace.arrival_s, factor * trace.input_tokens, trace.output_tokens, trace.name, trace.source
    )


def readings_frame(estimate: Search, samples: Mapping[int, Trace]) -> pd.DataFrame:
    """Order and throughput of the degrees by sample and reading of Xiong et al.'s Algorithm 1."""
    choices = product(
        links().items(), FORMULAS, ("instances", "line 17"), ("gpu", "instance"), samples.items()
    )
    rows = []
    for (name, link), (formula, told), scaling, overhead_per, (seed, sample) in choices:
        latency = roofline_source(link=link)
        found = estimate(
            sample, latency=latency, kv_formula=formula, scaling=scaling, overhead_per=overhead_per
        )
        rows.append(
            {
                "link": name,
                "KV cache": f"{told} (printed)" if formula == "full" else told,
                "scaling": scaling,
                "overhead per": overhead_per,
                "seed": seed,
                "order": found.ranking("v100"),
                **{f"t={d.tensor_parallel} [tokens/s]": d.system_tps for d in found.degrees},
            }
        )
    return pd.DataFrame(rows)


def simulations_frame(
    machine: Cluster,
    model: Llm,
    degrees: Sequence[int],
    works: Mapping[int, Trace],
    router: Builtin,
) -> pd.DataFrame:
    """Every degree simulated with a router, by link, engine, degree and seed.

    Column ``ends_s`` holds the completion times of all instances.
    """
    parts = []
    for (name, link), (told, (engine, formula)) in product(links().items(), SETTINGS.items()):
        spec = replace(PAPERS, steps=roofline_steps(link=link), rules=engine, kv_formula=formula)
        made = {t: replicated(machine, model, {"v100": t}, spec) for t in degrees}
        found = compare(
            made, router, lambda _, seed: works[seed], np.inf, tuple(works), measure=_measured
        )
        parts.append(found.frame.assign(link=name, engine=told).rename(columns={"plan": "t"}))
    rows = pd.concat(parts, ignore_index=True)
    return rows[["link", "engine", "seed", "t", *rows.columns[4:-2]]]


def _measured(run: Run) -> dict[str, object]:
    result, ends_s = metrics(run), run.completion_s()
    return {
        TPS: result.total_tps,
        "throughput [requests/s]": result.requests_per_s,
        "completion, slowest [s]": float(ends_s.max()),
        "slowest/fastest instance": result.imbalance,
        "preemptions": result.preemptions,
        "ends_s": ends_s,
    }


def by_setting(simulated: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """Simulated tokens/s by link and engine: a row per sample, a column per degree."""
    return {
        (str(link), str(engine)): rows.pivot(index="seed", columns="t", values=TPS)
        for (link, engine), rows in simulated.groupby(["link", "engine"], sort=False)
    }


def largest_share(estimates: Sequence[DegreeSearch], tps: pd.DataFrame) -> NDArray[np.float64]:
    """Estimated over simulated throughput by sample, at the degree where it is largest.

    ``tps`` is one of :func:`by_setting`, its samples in the order of ``estimates``.
    """
    estimated = [[degree.system_tps for degree in found.degrees] for found in estimates]
    shares: NDArray[np.float64] = (np.array(estimated) / tps.to_numpy()).max(axis=1)
    return shares


def order_of(tps: pd.Series) -> str:
    """Degrees, the index of ``tps``, from the fastest to the slowest, as the claims write it."""
    return ">".join(map(str, tps.sort_values(ascending=False, kind="stable").index))


def sensitivity_frame(
    estimate: Search, samples: Sequence[Trace], overheads_ms: Sequence[float]
) -> pd.DataFrame:
    """Order of the degrees by link, KV formula, engine time per step and input length."""
    rows = []
    for (name, link), (formula, told), overhead, factor in product(
        links().items(), FORMULAS, overheads_ms, (1, 3)
    ):
        latency = roofline_source(link=link, step_overhead_s=overhead / 1e3)
        orders = [
            estimate(stretched(sample, factor), kv_formula=formula, latency=latency).ranking("v100")
            for sample in samples
        ]
        as_published = all(order == PUBLISHED for order in orders)
        rows.append((name, told, overhead, f"x {factor}", ", ".join(orders), as_published))
    return pd.DataFrame(
        rows,
        columns=["link", "KV cache", "engine time per step [ms]", "inputs",
                 "orders of the samples", "as published"],
    )  # fmt: skip


def estimated_figure(table: pd.DataFrame) -> Figure:
    """Bars of the estimated throughput by degree, a panel per link, a shade per sample.

    Drawn are the readings of Xiong et al., section 3.2: instances scale, an engine costs each GPU.
    """
    drawn = table[(table["scaling"] == "instances") & (table["overhead per"] == "gpu")]
    number = (drawn.groupby("seed", sort=False).ngroup() + 1).astype(str)
    told = drawn["KV cache"].str.removesuffix(" (printed)") + ", sample " + number
    degrees = {name: int(name[2:].split()[0]) for name in map(str, drawn) if name.startswith("t=")}
    bars = (
        drawn.assign(series=told)
        .rename(columns=degrees)
        .melt(["link", "series"], list(degrees.values()), "t", TPS)
    )
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.5), sharey=True)
    colours = _shades(CYCLE[:2], drawn["seed"].nunique())
    for axis, (link, rows) in zip(axes, bars.groupby("link", sort=False), strict=True):
        sns.barplot(rows, y=TPS, **_BARS, palette=colours, legend=axis is axes[0], ax=axis)
        axis.set(xlabel="tensor-parallel degree t", title=link)
    axes[0].set_ylabel("estimated throughput [tokens/s]")
    axes[0].set_ylim(top=axes[0].get_ylim()[1] * 1.35)
    axes[0].legend(ncols=2, loc="upper right")
    return fig


def simulated_figure(simulated: pd.DataFrame, estimated: Mapping[str, DegreeSearch]) -> Figure:
    """Estimated beside simulated throughput by link, and when each instance is done.

    ``simulated`` comes from :func:`simulations_frame`; ``estimated`` has the first sample by link.
    """
    degrees, seeds = simulated["t"].unique(), simulated["seed"].unique()
    number = (simulated.groupby("seed", sort=False).ngroup() + 1).astype(str)
    series = simulated["engine"] + ", sample " + number
    estimates = pd.DataFrame(
        {"link": link, "series": "estimate, sample 1", "t": d.tensor_parallel, TPS: d.system_tps}
        for link, found in estimated.items()
        for d in found.degrees
    )
    both = pd.concat([estimates, simulated.assign(series=series)])
    both["k"] = both[TPS] / 1e3
    colours = ["#888888", *_shades(CYCLE[: len(SETTINGS)], len(seeds))]
    fig, axes = plt.subplots(1, 3, figsize=(10.2, 3.7), width_ratios=(1, 1, 0.9))
    for axis, (link, rows) in zip(axes, both.groupby("link", sort=False), strict=False):
        sns.barplot(rows, y="k", **_BARS, palette=colours, ax=axis)
        axis.set(xlabel="tensor-parallel degree t", ylabel="", title=link)
    axes[0].set_ylabel("throughput [1,000 tokens/s]")
    axes[1].sharey(axes[0])
    axes[0].set_ylim(top=1.05 * both["k"].max())
    shared_legend(fig, "outside upper left", ncols=4)
    first = simulated[(simulated["engine"] == "prefill first") & (simulated["seed"] == seeds[0])]
    for row in first.itertuples():
        j, k = list(estimated).index(row.link), list(degrees).index(row.t)
        count = len(row.ends_s)
        axes[2].bar(
            k + (j - 0.5) * 0.4 + ((np.arange(count) + 0.5) / count - 0.5) * 0.36,
            row.ends_s,
            0.36 / count - 0.01,
            color=(CYCLE[0], CYCLE[2])[j],
            label=row.link if k == 0 else None,
        )
    axes[2].set(
        xticks=range(len(degrees)),
        xticklabels=degrees,
        xlabel="tensor-parallel degree t",
        ylabel="completion time of each instance [s]",
        title="Instances, sample 1",
    )
    axes[2].grid(axis="x", visible=False)
    axes[2].set_ylim(top=1.2 * axes[2].get_ylim()[1])
    axes[2].legend(loc="upper left", ncols=1)
    return fig


def _shades(colours: Iterable[str], count: int) -> list[object]:
    """Each colour from full to pale in ``count`` shades, one per sample."""
    return [s for c in colours for s in sns.light_palette(c, count + 1, reverse=True)[:count]]
