"""Request scheduling of Xiong et al. (section 5.2, Fig. 5 and 6): served, compared and drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hetero.catalog import Link, llm
from hetero.cluster import cluster
from hetero.comparison import compare
from hetero.deployment import Deployment, Engine
from hetero.engines import PAPERS, replicated, roofline_steps
from hetero.intervals import interval, ranking
from hetero.memory import KvFormula
from hetero.plots.figures import CYCLE, shared_legend
from hetero.progress import progress
from hetero.routers import Builtin, Normal, Predictor, Router, Workload
from hetero.simulator import Run, metrics
from hetero.workload import Trace
from pipelines.studies.tensor_parallel_search import (
    ENGINES,
    FORMULAS,
    SETTINGS,
    TPS,
    links,
    stretched,
)

#: Arrival rates of Fig. 5 and 6 [requests/s].
RATES: Final = (8.0, 16.0, 24.0, np.inf)
#: And of Fig. 6 here: five instances keep up with the paper's rates, so that nothing is seen there.
RATES_6: Final = (8.0, 16.0, 24.0, 32.0, 48.0, 64.0, np.inf)
RATE: Final = "rate [req/s]"
GAP: Final = "gap of completion [s]"
#: The model on two machines (section 5.3).
LARGER: Final = "DeepSeek-R1-Distill-Qwen-14B"
_GAIN: Final = "OS over RR at 24 req/s [%]"
_LONG_NAMES: Final = {
    "RR": "round robin (RR)", "SI": "single instance (SI)", "MB": "memory based (MB)",
    "OS": "Algorithm 2 (OS)", "WRR": "weighted round robin (WRR)",
}  # fmt: skip
_COLOURS: Final = dict.fromkeys(("RR", "SI", "MB", "WRR"), CYCLE[0]) | {
    "OS": CYCLE[4], "OS, ties least": "#F0A884", "hetero": CYCLE[2]
}  # fmt: skip

Routers = Mapping[str, Router | Builtin]
Values = NDArray[np.float64]


def two_instances(
    link: Link | None, engine: Engine, kv_formula: KvFormula = "model", **efficiency: float
) -> Deployment:
    """Llama-3-8B on four V100 and on a single one; ``"full"`` counts its KV cache as 2 l h."""
    return replicated(
        cluster("xiong-8xv100"),
        llm("Llama-3-8B"),
        {"v100": (4, 1)},
        replace(
            PAPERS,
            steps=roofline_steps(link=link, **efficiency),
            rules=engine,
            kv_formula=kv_formula,
        ),
    )


def two_machines(link: Link | None, engine: Engine, kv_formula: KvFormula = "model") -> Deployment:
    """DeepSeek-R1-Distill-Qwen-14B four times on two V100 with this link, and once on an A800."""
    sources = {True: roofline_steps(link=link), False: roofline_steps()}
    return replicated(
        cluster("xiong-v100-a800"),
        llm(LARGER),
        {"v100": 2, "a800": 1},
        replace(
            PAPERS,
            steps=lambda gpu, model, degree: sources["V100" in gpu.name](gpu, model, degree),
            rules=engine,
            kv_formula=kv_formula,
        ),
    )


def printed(model: str = "Llama-3-8B", **options: Any) -> Workload:
    """Xiong et al.'s Algorithm 2 as printed: the first of ties; eq. 5 and 8 count 2 l h a token."""
    kv_bytes = llm(model).kv_bytes_per_token("fp16", "full")
    return Workload(kv_bytes=kv_bytes, **{"ties": "first", **options})


def by_setting(
    build: Callable[[Link | None, Engine, KvFormula], Deployment],
    engines: Collection[str] = tuple(SETTINGS),
) -> dict[tuple[str, str], Deployment]:
    """A deployment for each link and label of :data:`SETTINGS`; the first is what is judged."""
    return {(name, e): build(link, *SETTINGS[e]) for name, link in links().items() for e in engines}


def rate_name(rate_rps: float) -> str:
    """An arrival rate in words."""
    return "all at once" if np.isinf(rate_rps) else f"{rate_rps:g} req/s"


@dataclass(frozen=True, slots=True)
class Erring:
    r"""Predictions that err by a known spread: the true output times :math:`e^{\sigma z}`.

    With z standard normal, one for each request; the median of the factor is 1.

    Parameters
    ----------
    spread
        Sigma, the spread of the logarithm of predicted over true outputs.

    Examples
    --------
    >>> chats = Trace([0.0, 1.0], [100, 100], [7, 400])
    >>> Erring(0.0).predict(chats, np.random.default_rng(0)).tolist()
    [7, 400]
    """

    spread: float

    def predict(self, trace: Trace, rng: np.random.Generator) -> NDArray[np.int32]:
        """Predicted output tokens, at least 1 and less than a million."""
        factors = np.exp(self.spread * rng.standard_normal(len(trace)))
        return np.clip(np.rint(factors * trace.output_tokens), 1, 10**6).astype(np.int32)


@dataclass(frozen=True)
class Workbench:
    """Samples of ``requests`` lengths, one for each seed; ``show`` shows progress."""

    lengths: Trace
    requests: int
    seeds: Sequence[int]
    show: bool = False

    def trace(self, seed: int, rate_rps: float, factor: int = 1) -> Trace:
        """A sample with inputs ``factor`` times as long: a Poisson process, or all at once."""
        rng = np.random.default_rng(seed)
        sample = self.lengths.sample(min(self.requests, len(self.lengths)), rng)
        sample = sample if factor == 1 else stretched(sample, factor)
        return sample.all_at_once() if np.isinf(rate_rps) else sample.poisson(rate_rps, rng)

    def offered_tps(self, rate_rps: float) -> float:
        """Tokens per second that arrive, mean over the seeds; infinite if all arrive at once."""
        if np.isinf(rate_rps):
            return np.inf
        traces = [self.trace(seed, rate_rps) for seed in self.seeds]
        tps = [(t.input_tokens.sum() + t.output_tokens.sum()) / t.arrival_s[-1] for t in traces]
        return float(np.mean(tps))

    def serve(
        self,
        deployments: Mapping[tuple[str, str], Deployment],
        routers: Routers,
        *,
        predictors: Mapping[str, Predictor] | None = None,
        factor: int = 1,
        rates: Sequence[float] = RATES,
    ) -> pd.DataFrame:
        """A row per deployment (by link and engine), predictor, rate, seed and strategy.

        The columns ``done, <replica> [s]`` say when each replica was through with its requests.
        """
        predictors = predictors or {"normal (paper)": Normal()}
        cells, parts = list(product(deployments.items(), predictors.items())), {}
        total = len(cells) * len(rates) * len(self.seeds) * len(routers)
        with progress(total, "routers", unit="runs", show=self.show) as advance:
            for ((link, engine), deployment), (told, predictor) in cells:
                parts[link, engine, told] = compare(
                    deployment, routers, lambda rate, seed: self.trace(seed, rate, factor), rates,
                    self.seeds, predictor=predictor, measure=through, progress=advance,
                ).frame.drop(columns="plan")  # fmt: skip
        labels = ["link", "engine", "predictor"]
        found = pd.concat(parts, names=labels).reset_index(labels).reset_index(drop=True)
        return found.rename(columns={"rate_rps": RATE, "router": "strategy"})

    def sensitivity(self, routers: Routers, overheads_ms: Sequence[float]) -> pd.DataFrame:
        """Orders, and the gain of OS over RR, by link, KV cache, input length and step overhead."""
        rows = []
        for (name, link), (formula, kv), factor, overhead in product(
            links().items(), FORMULAS, (1, 3), overheads_ms
        ):
            deployment = two_instances(
                link, ENGINES["prefill first"], formula, step_overhead_s=overhead / 1e3
            )
            frame = self.serve({(name, "prefill first"): deployment}, routers, factor=factor)
            rows.append(
                {
                    "link": name,
                    "KV cache": kv,
                    "engine time per step [ms]": overhead,
                    "inputs": f"x {factor}",
                    _GAIN: gain_percent(frame, 24.0).mean(),
                    **{f"order at {rate_name(r)}": order(frame, r, routers) for r in RATES},
                }
            )
        return pd.DataFrame(rows)


def through(run: Run) -> dict[str, float]:
    """Throughput, when each replica was through, and how far apart the first and the last were."""
    ends = run.completion_s()
    done = (f"done, {replica.name} [s]" for replica in run.deployment.replicas)
    gap = float(np.nanmax(ends) - np.nanmin(ends))
    return {TPS: metrics(run).total_tps, **dict(zip(done, ends, strict=True)), GAP: gap}


def pick(frame: pd.DataFrame, rate_rps: float | None = None, **labels: str) -> pd.DataFrame:
    """Rows at a rate and with these values of link, engine, predictor or strategy."""
    wanted = labels if rate_rps is None else {RATE: rate_rps, **labels}
    return frame[(frame[list(wanted)] == pd.Series(wanted)).all(axis=1)]


def values(
    frame: pd.DataFrame, rate_rps: float, names: Collection[str], column: str = TPS
) -> dict[str, Values]:
    """Values at a rate by strategy, in the order of the seeds."""
    wide = pick(frame, rate_rps).pivot(index="seed", columns="strategy", values=column)
    return {name: wide[name].to_numpy() for name in names}


def order(frame: pd.DataFrame, rate_rps: float, names: Collection[str]) -> str:
    """Strategies from the highest throughput to the lowest, as far as the seeds tell."""
    return ranking(values(frame, rate_rps, names))


def gain_percent(frame: pd.DataFrame, rate_rps: float) -> Values:
    """Throughput of OS over that of RR by seed [%]."""
    tps = values(frame, rate_rps, ("OS", "RR"))
    return 100 * (tps["OS"] / tps["RR"] - 1)


def largest_gain(frame: pd.DataFrame) -> str:
    """Largest mean gain of OS over RR among the rates, and where."""
    gain, rate = max((float(gain_percent(frame, r).mean()), r) for r in frame[RATE].unique())
    return f"{gain:+.1f} % at {rate_name(rate)}"


def memory_ratio(frame: pd.DataFrame) -> Values:
    """Throughput of MB over that of OS by seed, mean over the rates."""
    tps = (values(frame, rate, ("MB", "OS")) for rate in RATES)
    return np.asarray(np.mean([at["MB"] / at["OS"] for at in tps], axis=0))


def gap_ratios(frame: pd.DataFrame) -> list[float]:
    """By rate, gap between completion times under OS over that under RR; means over seeds."""
    gaps = [values(frame, rate, ("OS", "RR"), GAP) for rate in RATES]
    return [float(at["OS"].mean() / at["RR"].mean()) for at in gaps]


def best_share(frame: pd.DataFrame, names: Collection[str]) -> Values:
    """Share of the rates at which OS has the highest throughput, by seed."""
    tps = [pd.DataFrame(values(frame, rate, names)) for rate in RATES]
    return np.asarray(np.mean([at.idxmax(axis=1) == "OS" for at in tps], axis=0))


def other_readings(frame: pd.DataFrame, what: Callable[[pd.DataFrame], str]) -> str:
    """A quantity for every link and engine but the first, as text."""
    readings = list(frame.groupby(["link", "engine"], sort=False))[1:]
    return "; ".join(f"{link}, {engine}: {what(rows)}" for (link, engine), rows in readings)


def places(table: pd.DataFrame, rate_rps: float, name: str, place: str) -> str:
    """In how many settings of the sensitivity a strategy is ``first`` or ``last``, by link."""
    orders = table[f"order at {rate_name(rate_rps)}"]
    chains = orders.str.split(",").str[0].str.replace(">=", ">").str.split(">")
    hits = chains.str[0 if place == "first" else -1] == name
    texts = [
        f"{at.sum()} of {len(at)} settings with {link}"
        for link, at in hits.groupby(table["link"], sort=False)
    ]
    return f"{name} is {place} by mean in {' and '.join(texts)} (sensitivity table). "


def summary_frame(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Throughput with its 95 % interval over the seeds, and mean completion times, by ``keys``."""
    groups = frame.groupby(list(keys), sort=False)
    ends = [column for column in frame if str(column).startswith("done, ")]
    bounds = groups[TPS].apply(interval)
    table = groups[[TPS, *ends, GAP]].mean()
    for k, name in enumerate(("low [tokens/s]", "high [tokens/s]")):
        table.insert(k + 1, name, bounds.str[k].astype(float))
    return table.reset_index()


def rate_frame(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Mean throughput over the seeds by ``keys``, a column per rate."""
    means = frame.groupby([*keys, RATE], sort=False)[TPS].mean().unstack()
    return means.rename(columns=lambda rate: f"{rate_name(rate)} [tokens/s]").reset_index()


def throughput_figure(frame: pd.DataFrame, bench: Workbench) -> Figure:
    """Bars by strategy, panels by link and rate; diamonds for chunked prefill."""
    names = list(frame["strategy"].unique())
    bars = {"x": "tps", "y": "strategy", "order": names}
    colours = {name: _COLOURS.get(name, "#9A9A9A") for name in names}

    def draw(axis: Axes, rows: pd.DataFrame, rate: float) -> None:
        rows = rows.assign(tps=rows[TPS] / 1e3)
        sns.barplot(
            pick(rows, engine="prefill first"), **bars, hue="strategy", palette=colours,
            saturation=1, width=0.72, errorbar=interval, ax=axis,
            err_kws={"color": "#222222", "linewidth": 0.9},
        )  # fmt: skip
        sns.pointplot(
            pick(rows, engine="chunked"), **bars, errorbar=None, linestyle="none", marker="D",
            color="white", markeredgecolor="#222222", markeredgewidth=1.0, markersize=3.6, ax=axis,
        )  # fmt: skip
        axis.set_yticks(range(len(names)), [_LONG_NAMES.get(one, one) for one in names])
        if np.isfinite(limit := bench.offered_tps(rate) / 1e3):
            axis.axvline(limit, color="#777777", linewidth=0.9, linestyle=":")

    count = frame["link"].nunique()
    fig = _panels(frame, 0.9 + 0.23 * len(names) * count + 0.45 * count, draw)
    for axis in fig.axes[-frame[RATE].nunique() :]:
        axis.set_xlabel("throughput [1,000 tokens/s]")
        axis.set_xlim(left=0)
    handles = [
        Line2D([], [], marker="D", linestyle="", color="white", markeredgecolor="#222222"),
        Line2D([], [], color="#777777", linewidth=0.9, linestyle=":"),
        *(Patch(color=_COLOURS.get(one, "#9A9A9A")) for one in ("RR", "OS", "", "hetero")),
    ]
    told = ("Xiong et al.", "their Algorithm 2", "common dispatchers", "this project's router")
    names = ["chunked prefill", "offered load", *told]
    fig.legend(handles, names, loc="outside upper right", ncols=3)
    return fig


def completion_figure(frame: pd.DataFrame) -> Figure:
    """Completion times of both instances by strategy, prefill first; a line joins the two."""
    names = list(frame["strategy"].unique())
    where = np.arange(len(names))[::-1]

    def draw(axis: Axes, rows: pd.DataFrame, rate: float) -> None:
        means = rows.groupby("strategy")[[f"done, v100 t={t} [s]" for t in (4, 1)]].mean()
        for k, ends in zip(where, means.loc[names].to_numpy(), strict=True):
            axis.plot(ends, [k, k], color="#BBBBBB", linewidth=1.4, zorder=1)
            for end, colour, mark, told in zip(ends, CYCLE, "os", ("t = 4", "t = 1"), strict=False):
                if np.isfinite(end):
                    axis.plot(
                        end, k, mark, color=colour, linestyle="", label=told if k == 0 else None
                    )
        axis.set_yticks(where, names)
        axis.grid(axis="y", visible=False)

    fig = _panels(pick(frame, engine="prefill first"), 5.6, draw)
    fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    for axis in fig.axes[-len(RATES) :]:
        axis.set_xlabel("completion time [s]")
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    return fig


def _panels(
    frame: pd.DataFrame, height: float, draw: Callable[[Axes, pd.DataFrame, float], None]
) -> Figure:
    """A panel per link (rows) and rate (columns), each drawn from its part of ``frame``."""
    names, rates = list(frame["link"].unique()), list(frame[RATE].unique())
    fig, axes = plt.subplots(
        len(names), len(rates), figsize=(10.2, height), sharex="col", sharey=True, squeeze=False
    )
    for row, link in zip(axes, names, strict=True):
        for axis, rate in zip(row, rates, strict=True):
            draw(axis, pick(frame, rate, link=link), rate)
        row[0].set_ylabel(link)
    for axis, rate in zip(axes[0], rates, strict=True):
        axis.set_title(rate_name(rate))
    return fig


def theta_figure(frame: pd.DataFrame) -> Figure:
    """Throughput over theta by rate, a panel per link; the second predictor dashed, no interval."""
    curves = frame.assign(
        theta=frame["theta"].astype(float), rate=frame[RATE].map(rate_name), tps=frame[TPS] / 1e3
    )
    fig, axes = plt.subplots(1, frame["link"].nunique(), figsize=(8.6, 3.5))
    for axis, (link, rows) in zip(axes, curves.groupby("link", sort=False), strict=True):
        styles = list(zip(frame["predictor"].unique(), ("-", "--"), (interval, None), strict=True))
        for predictor, dashes, band in styles:
            sns.lineplot(
                rows[rows["predictor"] == predictor], x="theta", y="tps", hue="rate",
                palette=CYCLE[: len(RATES)], marker="o", linestyle=dashes, errorbar=band,
                err_kws={"alpha": 0.15, "linewidth": 0}, legend=bool(band), ax=axis,
            )  # fmt: skip
        for predictor, dashes, _ in styles:
            axis.plot([], [], dashes, color="#555555", label=predictor)
        axis.set(title=link, ylabel="")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("throughput [1,000 tokens/s]")
    shared_legend(fig, "outside upper left")
    return fig
