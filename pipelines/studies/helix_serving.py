"""Helix's methods served: tables, pictures and claims of Fig. 6 to 8 and 10, and plans ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from hetero.placement import FlowNetwork, Placement
from hetero.plots import figures, placements
from hetero.routers.pipelines import FlowRouter
from hetero.simulator.pipeline_run import Latency, PipelineRun, WindowFigures, combine
from hetero.workload import TraceSource
from pipelines.studies import helix
from pipelines.studies import helix_delivered as delivered
from pipelines.studies.helix_artifact import (
    Mode,
    artifact_flow,
    artifact_network,
    expected,
    printed_tps,
)
from pipelines.studies.results import Rows, claim_rows

Served: TypeAlias = dict[tuple[str, str], WindowFigures]
"""By ``"<cluster> <model> <method>"`` and protocol."""

OFFLINE, HAND, PRINTED = "offline", "online, by hand", "online, 75 %"
SIMULATOR, CLUSTER = (f"decode throughput, Helix's {where}" for where in ("simulator", "cluster"))
_METHODS = ("helix", "swarm", "separate", "sp_plus", "ours")
_LABELS: Final = dict(zip(_METHODS, ("Helix", "Swarm", "SP", "SP+", "ours"), strict=True))
_COLOURS: Final = dict(zip(_LABELS, figures.CYCLE, strict=False))
SCHEDULERS: Final = ("helix", "swarm", "random", "shortest queue")
FIGURES: Final = {6: "single-24", 7: "geo-24", 8: "hetero-42"}
_claim = partial(claim_rows, "helix")
# Claims of Helix's throughput over another's (offline or online), and of the change of its mean
# prompt or decode latency: setting, then number, method and what is compared.
_COMPARED: Final = """
single-24 30B: 1a separate offline, 1b swarm offline, 2a separate online, 2b swarm online
single-24 70B: 3a separate offline, 3b swarm offline, 4a separate online, 4b swarm online
geo-24 30B: 5a separate offline, 5b separate online, 6a swarm offline, 6b swarm online
geo-24 70B: 7a separate offline, 7b separate online, 8a swarm offline, 8b swarm online
hetero-42 70B: 9a swarm offline, 9b separate offline, 9c sp_plus offline, 10a swarm online, \
10b separate online, 10c sp_plus online, 22a separate online
geo-24 30B: 22b swarm prompt, 22c swarm decode
single-24 30B: 23a separate prompt, 23b separate decode, 23c swarm prompt, 23d swarm decode
single-24 70B: 24a swarm prompt, 24b swarm decode, 24c separate prompt, 24d separate decode
geo-24 30B: 25a separate prompt, 25b separate decode, 25c swarm prompt, 25d swarm decode
geo-24 70B: 26a swarm prompt, 26b swarm decode, 26c separate prompt, 26d separate decode
hetero-42 70B: 28a swarm prompt, 28b separate prompt, 28c sp_plus prompt
"""


@dataclass(frozen=True)
class HelixServing:
    """How Helix's methods and our plans are served: window offline, length of a test online [s].

    With ``raw`` times per layer are the published ones, else their knots.
    """

    source: TraceSource
    raw: bool
    window_s: tuple[float, float]
    online_s: float
    seed: int

    def case(self, case: helix.ServedMethod) -> Served:
        """A case offline, and online by the artifact's protocol and by the paper's.

        The paper offers 75 % of what each part reached offline, after a warm-up.
        """
        run = partial(helix.run, case, source=self.source, raw=self.raw, seed=self.seed)
        offline = run(mode="offline", offline_s=self.window_s)
        by_hand = run(mode="online", online_s=self.online_s)
        peaks = (helix.peak_tps(one.serving(), self.source) for one in offline.runs)
        offered = tuple(helix.PEAK_SHARE * peak for peak in peaks)
        warm_up_s, online_s = helix.WARM_UP_S, self.online_s
        printed = run(mode="online", offered_tps=offered, warm_up_s=warm_up_s, online_s=online_s)
        results = {OFFLINE: offline, HAND: by_hand, PRINTED: printed}
        return {(case.name, how): result.serving for how, result in results.items()}

    def placement(self, one: Placement) -> WindowFigures:
        """What one placement serves offline with Helix's scheduler and feed."""
        requests = helix.offline_requests(self.source, seed=self.seed)
        return delivered.deliver(delivered.Option("one", (one,)), requests, self.window_s)[1]

    def ours(self, name: str, best: delivered.DeliveredOption, published: WindowFigures) -> Served:
        """Our plan offline, and online at 75 % of the peak of Helix's placement.

        Parts are offered what they decode of the whole.
        """
        offered = helix.PEAK_SHARE * helix.peak_tps(published, self.source)
        runs = []
        for one in best.option.placements:
            share = self.placement(one).decode_tps / best.serving.decode_tps
            runs.append(
                helix.run_online(
                    FlowNetwork(one), FlowRouter(), self.source, offered * share,
                    warm_up_s=helix.WARM_UP_S, duration_s=self.online_s, seed=self.seed,
                )
            )  # fmt: skip
        ours = f"{name} ours"
        return {(ours, OFFLINE): best.serving, (ours, PRINTED): combine(ours, tuple(runs))}

    def baselines(self, served: Served, settings: Sequence[str]) -> pd.DataFrame:
        """Placements of Swarm and Petals offline, beside what the artifact prints for them.

        Swarm's with its own scheduler, as it was served, and all with Helix's, as in Fig. 9.
        """
        rows = []
        for name in (f"{s} {method}" for s in settings for method in ("swarm", "petals")):
            network = artifact_network(name, raw=self.raw)
            route = helix.router("helix", "offline", artifact_flow(network))
            run = helix.run_offline(
                network, route, self.source, window_s=self.window_s, seed=self.seed
            )
            by = {"model_placement": run.serving().decode_tps}
            if (name, OFFLINE) in served:
                by = {"": served[name, OFFLINE].decode_tps} | by
            for experiment, decoded in by.items():
                theirs, real = printed_tps(name, experiment=experiment or None)
                scheduler = "helix" if experiment else name.split()[2]
                off = 100 * (decoded / theirs - 1)
                rows.append((*name.split(), scheduler, decoded, theirs, off, real))
        columns = ["cluster", "model", "placement", "scheduler", "decoded [tokens/s]"]
        columns += ["Helix's simulator [tokens/s]", "over it [%]", "Helix's cluster [tokens/s]"]
        return pd.DataFrame(rows, columns=columns)


def scheduling_tables(
    runs: Mapping[tuple[str, str], PipelineRun],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Runs by cluster and scheduler, and the links on which prompts wait (Helix Fig. 10).

    The first table has decode throughput, and the mean wait on the three worst links and the share
    of them with 5 to 16 s; the second these links.
    """
    rows, waits = [], []
    for (cluster, scheduler), run in runs.items():
        worst = [(row[0], row[1], row[4]) for row in run.links().rows[:3]]
        wait = np.array([wait or 0.0 for *_, wait in worst])
        of_three = wait.mean(), np.mean((wait >= 5) & (wait <= 16))
        rows.append((cluster, scheduler, run.serving().decode_tps, *of_three))
        waits += [(cluster, scheduler, *link) for link in worst]
    links = ["cluster", "scheduler", "from", "to", "prompts waited [s]"]
    columns = ["cluster", "scheduler", "decoded", "waited", "5 to 16 s"]
    return pd.DataFrame(rows, columns=columns), pd.DataFrame(waits, columns=links)


def _published(name: str, how: str, where: str = "simulation") -> dict[str, float]:
    """What the artifact prints for a case and protocol; nothing for the paper's protocol."""
    mode: Mode = "offline" if how == OFFLINE else "online"
    return {} if how == PRINTED else expected(name, mode, how=where)


def serving_frame(served: Served) -> pd.DataFrame:
    """Every method on every cluster, beside what the artifact prints."""
    rows = []
    for (name, how), one in served.items():
        theirs, real = _published(name, how), _published(name, how, "prototype")
        row = [*name.split(), how, one.decode_tps]
        row += [printed.get("decode_throughput", np.nan) for printed in (theirs, real)]
        for kind, latency in (("prompt", one.prompt), ("decode", one.decode)):
            p50 = theirs.get(f"{kind}_latency_p50", np.nan)
            row += [latency.mean_s, latency.percentiles_s[50], p50]
        rows.append(row)
    columns = ["cluster", "model", "method", "serving", "decoded [tokens/s]"]
    columns += ["Helix's simulator [tokens/s]", "Helix's cluster [tokens/s]"]
    for kind in ("prompt", "decode"):
        columns += [f"{kind} latency, {what} [s]" for what in ("mean", "P50")]
        columns.append(f"Helix's simulator, {kind} P50 [s]")
    return pd.DataFrame(rows, columns=columns)


def comparison_frame(served: Served) -> pd.DataFrame:
    """Pairs of our value and the published one, by quantity; latencies by percentile [s]."""
    rows = []
    for (name, how), one in served.items():
        theirs, real = _published(name, how), _published(name, how, "prototype")
        for label, printed in ((SIMULATOR, theirs), (CLUSTER, real)):
            if "decode_throughput" in printed:
                rows.append((label, one.decode_tps, printed["decode_throughput"]))
        for kind, latency in (("prompt", one.prompt), ("decode", one.decode)):
            rows += [
                (f"{kind} latency percentiles", value, theirs[f"{kind}_latency_p{p}"])
                for p, value in latency.percentiles_s.items()
                if f"{kind}_latency_p{p}" in theirs
            ]
    order = [SIMULATOR, CLUSTER, "prompt latency percentiles", "decode latency percentiles"]
    table = pd.DataFrame(rows, columns=["quantity", "ours", "published"])
    return table.sort_values("quantity", key=lambda q: q.map(order.index), kind="stable")


def agreement(pairs: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Ours over what Helix published, throughput and latencies, and the errors by quantity."""
    errors = (pairs["ours"] / pairs["published"] - 1).abs().groupby(pairs["quantity"], sort=False)
    table = pd.DataFrame({"values": errors.count()})
    for what in ("mean", "median", "max"):
        label = "largest" if what == "max" else what
        table[f"{label} error [%]"] = 100 * errors.agg(what)
    fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.8))
    for k, (quantity, label, colour) in enumerate(
        (
            (SIMULATOR, "its simulator", "#0072B2"),
            (CLUSTER, "its 24 nodes", "#D55E00"),
            ("prompt latency percentiles", "prompt latency", "#0072B2"),
            ("decode latency percentiles", "decode latency", "#D55E00"),
        )
    ):
        part = pairs[pairs["quantity"] == quantity]
        size = 4 if k < 2 else 3
        axes[k // 2].plot(part["published"], part["ours"], "o", ms=size, color=colour, label=label)
    for ax, what, unit in zip(
        axes, ("decode throughput", "latency"), ("tokens/s", "s"), strict=True
    ):
        ax.set(xscale="log", yscale="log", xlabel=f"Helix's {what} [{unit}]")
        ends = np.array(ax.get_xlim())
        ax.plot(ends, ends, color="0.6", lw=1, zorder=0)
        ax.legend()
        ax.set_ylabel(f"our {what} [{unit}]")
    for axis in (axes[0].xaxis, axes[0].yaxis):
        _ticks(axis, [30, 100, 300])
    return fig, table.reset_index()


def gains_frame(
    ranked: Mapping[str, delivered.Ranking], published: Mapping[str, WindowFigures]
) -> pd.DataFrame:
    """The option of largest flow, the one that delivers most, and Helix's placement."""
    columns = ["setting", "largest flow [tokens/s]", "it decodes [tokens/s]", "chosen"]
    columns += ["its flow [tokens/s]", "decodes [tokens/s]", "gain over the largest flow [%]"]
    columns += ["published decodes [tokens/s]", "gain over the published [%]"]
    rows = []
    for name, one in ranked.items():
        flow, best, theirs = one.by_flow, one.best, published[name].decode_tps
        decoded = best.serving.decode_tps
        row = (name, flow.flow_tps, flow.serving.decode_tps, best.option.name, best.flow_tps)
        rows.append((*row, decoded, 100 * (one.gain - 1), theirs, 100 * (decoded / theirs - 1)))
    return pd.DataFrame(rows, columns=columns)


def flow_and_throughput_figure(
    ranked: Mapping[str, delivered.Ranking], published: Mapping[str, WindowFigures]
) -> Figure:
    """Decode throughput over the flow, and the time of a token over the requests in flight.

    Flows are shares of the setting's largest, decode throughput is over that of Helix's placement.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.0))
    for (name, one), colour in zip(ranked.items(), figures.CYCLE, strict=False):
        largest, theirs = max(d.flow_tps for d in one.ranked), published[name].decode_tps
        for kind, marker in (("flow", "o"), ("chains", "s")):
            mine = [d for d in one.ranked if d.option.name.startswith("flow") == (kind == "flow")]
            style = {"marker": marker, "ls": "", "ms": 4, "color": colour}
            style |= {"mfc": colour if kind == "flow" else "none"}
            flows, decoded = ([d.flow_tps / largest for d in mine],
                              [d.serving.decode_tps / theirs for d in mine])  # fmt: skip
            left.plot(flows, decoded, label=name if kind == "flow" else None, **style)
            token_s = [d.serving.decode.mean_s for d in mine]
            right.plot([d.in_flight for d in mine], token_s, **style)
    left.axhline(1.0, color="0.3", lw=1, ls="--", label="Helix's placement")
    left.set(xlabel="maximum flow over the largest", ylabel="decoded over Helix's placement")
    right.set(xscale="log", yscale="log", xlabel="requests in flight", ylabel="decode latency [s]")
    for axis, at in ((right.xaxis, [30, 100, 300, 1000]), (right.yaxis, [0.1, 0.2, 0.5, 1, 2, 5])):
        _ticks(axis, at)
    left.set_ylim(bottom=0)
    for label, marker, filled in (("large flow", "o", "0.3"), ("chains", "s", "none")):
        left.plot([], [], marker, color="0.3", mfc=filled, ms=4, label=label)
    figures.shared_legend(fig, ncols=5)
    return fig


def _ticks(axis: Axis, at: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_major_locator(FixedLocator(at))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(ScalarFormatter())


def methods(row: Sequence[Axes], served: Served, setting: str) -> None:
    """Decode throughput and latencies of every method of a setting (Helix Fig. 6 to 8).

    Lines and crosses are the artifact's simulator and cluster; boxes are quartiles, whiskers 5 to
    95 %.
    """
    names = {m: f"{setting} {m}" for m in _METHODS if (f"{setting} {m}", OFFLINE) in served}
    for k, (method, name) in enumerate(names.items()):
        colour, online = _COLOURS[method], served[name, PRINTED]
        row[0].bar(k, served[name, OFFLINE].decode_tps, 0.36, color=colour, alpha=1)
        if method != "ours":
            theirs = _published(name, OFFLINE)["decode_throughput"]
            row[0].hlines(theirs, k - 0.18, k + 0.18, color="black", lw=1.2)
            if real := _published(name, OFFLINE, "prototype"):
                row[0].plot(k, real["decode_throughput"], "x", color="black", ms=5)
        row[0].bar(k + 0.4, online.decode_tps, 0.36, color=colour, alpha=0.55)
        _box(row[1], k, online.prompt, colour)
        _box(row[2], k, online.decode, colour)
    labels = [_LABELS[method] for method in names]
    row[0].set_xticks(np.arange(len(names)) + 0.2, labels)
    for ax, what in zip(row[1:], ("prompt", "decode"), strict=True):
        ax.set_xticks(range(len(names)), labels)
        ax.set_ylim(bottom=0)
        ax.set_ylabel(f"{what} latency [s]")
    row[0].set_ylabel("decoded [tokens/s]")
    row[0].set_title(f"LLaMA-{setting.split()[1]}: offline, online (pale)", fontsize=9)


def _box(axis: Axes, at: int, latency: Latency, colour: str) -> None:
    keys = ("whislo", "q1", "med", "q3", "whishi")
    stats: dict[str, Any] = dict(zip(keys, latency.percentiles_s.values(), strict=True))
    drawn = axis.bxp(
        [stats | {"fliers": []}], positions=[at], widths=0.5, showfliers=False, patch_artist=True
    )
    drawn["boxes"][0].set(facecolor=colour, alpha=0.8)
    drawn["medians"][0].set(color="black")


def schedulers_figure(table: pd.DataFrame) -> Figure:
    """Decode throughput by scheduler, printed and ours (Helix Fig. 10a)."""
    fig, axis = plt.subplots(figsize=(6.0, 3.0))
    sns.barplot(
        table, x="cluster", y="decoded", hue="scheduler", hue_order=SCHEDULERS, saturation=1,
        ax=axis,
    )  # fmt: skip
    names = [[f"{cluster} 70B {one}" for cluster in ("single-24", "geo-24")] for one in SCHEDULERS]
    printed = [[printed_tps(n, experiment="request_scheduling") for n in row] for row in names]
    figures.mark_bars(axis, printed)
    axis.set_xticks([0, 1], ["single cluster", "geo-distributed"])
    axis.set(xlabel="", ylabel="decoded [tokens/s]")
    axis.margins(y=0.1)
    axis.plot([], [], "_", color="black", ms=9, mew=1.2, label="Helix's simulator")
    axis.plot([], [], "x", color="black", ms=5, mew=1.2, label="24 real nodes")
    axis.legend(title="")
    return fig


def congestion_figure(waits: pd.DataFrame) -> Figure:
    """Helix's placement of LLaMA-70B on regions, and the links that congest (Helix Fig. 10b).

    ``waits`` has the links on which prompts wait longest, by scheduler; red are those of Swarm's
    and of random scheduling.
    """
    network = artifact_network("geo-24 70B helix-scheduling")
    followed = replace(network.max_flow(), link_tokens_per_s=artifact_flow(network))
    nodes = network.placement.problem.nodes
    at = {node.name: k for k, node in enumerate(nodes)}
    texts: dict[tuple[int, int], list[str]] = {}
    mine = waits[(waits["cluster"] == "geo-24") & (waits["scheduler"] != "shortest queue")]
    for row in mine.sort_values("scheduler", key=lambda s: s == "helix").itertuples(index=False):
        link = at[row[2]], at[row[3]]
        if row.scheduler != "helix" or link in texts:
            texts.setdefault(link, []).append(f"{row.scheduler} {row[4]:.1f} s")
    fig, axis = plt.subplots(figsize=(9.0, 4.6))
    marked = {link: "\n".join(lines) for link, lines in texts.items()}
    title = "mean wait of prompts for the links on which they wait longest"
    placements.draw(followed, axis, title=title, use=np.zeros(len(nodes)), marked=marked)
    regions = network.placement.problem.regions
    lanes = placements.rows(followed)
    for region in regions:
        own = [lanes[k] for k in lanes if nodes[k].region == region]
        axis.axhspan(min(own) - 0.45, max(own) + 0.45, color="0.93", zorder=0, lw=0)
        axis.text(-0.6, (min(own) + max(own)) / 2, region, rotation=90, ha="right", va="center")
    return fig


def claims(served: Served, schedules: pd.DataFrame, settings: Sequence[str]) -> Rows:
    """What one draw of requests says on the claims of this notebook."""
    return method_claims(served) + scheduler_claims(schedules) + fidelity_claims(served, settings)


def method_claims(served: Served) -> Rows:
    """Claims 1 to 10 and 22 to 28: Helix's placements beside the others', where they are served."""
    rows: Rows = []
    figure = {name: f"fig{k}_{name.replace('-', '_')}" for k, name in FIGURES.items()}
    for line in _COMPARED.strip().splitlines():
        setting, _, parts = line.partition(": ")
        for number, method, what in (part.split() for part in parts.split(", ")):
            if any((f"{setting} {m}", OFFLINE) not in served for m in ("helix", method)):
                continue
            pair = f"{setting} helix", f"{setting} {method}"
            if what in ("prompt", "decode"):
                value, by_hand = (
                    100 * (_ratio(served, *pair, how, what) - 1) for how in (PRINTED, HAND)
                )
                note = "means, 75 % of each method's peak; with the artifact's rates "
                note += f"{by_hand:+.0f} %"
            else:
                value = _ratio(served, *pair, OFFLINE if what == "offline" else PRINTED)
                note = "published placements, the artifact's feeds"
                if what == "online":
                    by_hand = _ratio(served, *pair, HAND)
                    note = f"75 % of each method's peak; with the artifact's rates {by_hand:.2f}"
            rows += _claim(figure[setting.split()[0]], note, {number: value})
    if ("hetero-42 70B helix", OFFLINE) in served:
        names = [f"hetero-42 70B {method}" for method in _METHODS[:4]]
        least, by_hand = (
            min(100 * (_ratio(served, names[0], o, how, "decode") - 1) for o in names[1:])
            for how in (PRINTED, HAND)
        )
        note = f"smallest over the baselines; with the artifact's rates {by_hand:+.0f} %"
        rows += _claim("fig8_hetero_42", note, {"28d": least})
    if ("geo-24 70B helix", OFFLINE) in served:
        pair = "geo-24 70B swarm", "geo-24 70B helix"
        note = f"Swarm's mean prompt latency {served[pair[0], OFFLINE].prompt.mean_s:.0f} s"
        rows += _claim("fig7_geo_24", note, {"27": _ratio(served, *pair, OFFLINE, "prompt")})
    return rows


def _ratio(served: Served, name: str, other: str, how: str, kind: str = "") -> float:
    """Decode throughput of a case over another's, or its mean latency of a kind."""
    a, b = (
        getattr(served[one, how], kind).mean_s if kind else served[one, how].decode_tps
        for one in (name, other)
    )
    return float(a / b)


def scheduler_claims(table: pd.DataFrame) -> Rows:
    """Claims 13, 14 and 31."""
    at = table.set_index(["cluster", "scheduler"])
    decoded, waited, inside = at["decoded"], at["waited"], at["5 to 16 s"]["geo-24"]
    note = "one placement; requests in flight of the others as the artifact sets them"
    pairs = {"13a": ("single-24", "swarm"), "13b": ("single-24", "random")}
    pairs |= {f"14{k}": ("geo-24", m) for k, m in zip("abc", SCHEDULERS[1:], strict=True)}
    ratios = {
        k: decoded[cluster, "helix"] / decoded[cluster, m] for k, (cluster, m) in pairs.items()
    }
    rows = _claim("fig10_scheduling", note, ratios)
    geo = waited["geo-24"]
    note = "means over the three " + ", ".join(f"{m} {geo[m]:.1f} s" for m in SCHEDULERS[:3])
    rows += _claim("fig10_congestion", note, {"31a": inside["swarm"], "31b": inside["random"]})
    order = sorted(("helix", "swarm", "random"), key=lambda method: geo[method])
    text = "<".join(name if name == "random" else name.capitalize() for name in order)
    note = "mean wait on the three worst links of each"
    return rows + _claim("fig10_congestion", note, {"31c": text})


def fidelity_claims(served: Served, settings: Sequence[str]) -> Rows:
    """Claims 15 and 33: errors against 24 real nodes, and what distance between regions costs."""
    errors: dict[str, list[float]] = {
        metric: [] for metric in ("decode_throughput", "prompt_latency_mean", "decode_latency_mean")
    }
    for (name, how), one in served.items():
        if not name.startswith("single-24") or name.endswith("ours"):
            continue
        real = _published(name, how, "prototype")
        values = (one.decode_tps, one.prompt.mean_s, one.decode.mean_s)
        for (metric, off), value in zip(errors.items(), values, strict=True):
            if metric in real:
                off.append(abs(value / real[metric] - 1))
    rows: Rows = []
    for letter, off in zip("abc", errors.values(), strict=True):
        if off:
            note = f"over {len(off)} results on 24 real nodes; ours agrees with Helix's simulator"
            rows += _claim("agreement", note, {f"15{letter}": 100 * float(np.mean(off))})
    both = [m for m in ("30B", "70B") if {f"single-24 {m}", f"geo-24 {m}"} <= set(settings)]
    if both:
        pairs = [
            (f"geo-24 {model} {method}", f"single-24 {model} {method}")
            for model in both
            for method in _METHODS[:3]
        ]
        most = max(_ratio(served, *pair, how) for pair in pairs for how in (OFFLINE, HAND))
        kinds = ("prompt", "decode")
        least = min(_ratio(served, *pair, HAND, kind) for pair in pairs for kind in kinds)
        rows += _claim("serving", f"offline and online, {both}", {"33a": most})
        rows += _claim("serving", f"online by hand, {both}", {"33b": least})
    return rows
