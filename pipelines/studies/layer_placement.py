"""Helix's layer placements: flows, sizes of its program, our plans, and what placements serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from hetero import paths
from hetero.arrays import Flags, Floats
from hetero.placement import Flow, FlowNetwork, Placement, Problem
from hetero.placement.pruning import all_links, pruned
from hetero.planners.helix import FlowPlan, with_partial_inference
from hetero.planners.helix.milp import Milp, judge
from hetero.planners.helix.planner import timing_key
from hetero.plots import figures, placements
from hetero.simulator.pipeline_run import PipelineRun
from hetero.timings import timing
from hetero.workload import TraceSource
from pipelines.studies.helix import router, run_offline
from pipelines.studies.helix_artifact import (
    artifact_flow,
    artifact_network,
    placement,
    printed_tps,
    problem,
    published,
    ranges_of,
    solver_log,
)
from pipelines.studies.results import Rows, claim_rows

REFERENCES: Final = {
    "single-24 70B": "single-24 70B helix",
    "hetero-42 70B": "hetero-42 70B helix-no-prune",
    "geo-24 70B": "geo-24 70B helix",
    "small-10 30B": "small-10 30B helix",
}
"""The best published placement of a setting."""
METHODS: Final = ("helix", "petals", "swarm")
RUN: Final = ("milp", "petals", "swarm")
"""Helix's methods as run here: its program, solved by ``hetero bench milp``, and its heuristics."""
DECODED: Final = "decode throughput [tokens/s]"
PRINTED: Final = ("Helix's simulator [tokens/s]", "Helix's cluster [tokens/s]")
_COLOURS: Final = dict(zip((*METHODS, "ours", "milp"), figures.CYCLE, strict=False))
_ABLATED: Final = ("geo-24", "hetero-42")


def milp_frame() -> pd.DataFrame:
    """What the program knew and when, as ``hetero bench milp --record`` solved it."""
    return pd.read_csv(paths.data("measured", "helix_milp.csv"), keep_default_na=False)


def milp_links(case: Problem) -> Flags | None:
    """Links that the program is given: pruned between regions, as the artifact has it."""
    return pruned(case) if len(case.regions) > 1 else None


def solved(setting: str, *, raw: bool = False) -> Placement:
    """The placement that the program ended with, such as ``"single-24 70B"``."""
    layers = milp_frame().query("setting == @setting")["layers"].iloc[-1]
    return Placement.of(problem(*setting.split(), raw=raw), ranges_of(layers), setting)


def examples_figure(flows: Mapping[str, Flow]) -> Figure:
    """Small placements side by side, each with its flow (Helix Fig. 1)."""
    fig, axes = plt.subplots(1, len(flows), figsize=(10.0, 2.4))
    for (name, flow), ax in zip(flows.items(), axes, strict=True):
        placements.draw(flow, ax, title=f"{name}\n{flow.tokens_per_s:,.0f} tokens/s", legend=False)
    return fig


def published_flows_frame() -> pd.DataFrame:
    """Exact maximum flow of every placement of the artifact, beside the objective it states."""
    rows = [
        (name, judge(best := placement(name)), one.tokens_per_s, judge(best, True), len(best.used))
        for name, one in published().items()
    ]
    columns = ["placement", "flow [tokens/s]", "published objective [tokens/s]"]
    return pd.DataFrame(rows, columns=[*columns, "with partial inference [tokens/s]", "nodes"])


def sizes_frame() -> pd.DataFrame:
    """Variables and constraints of the program, with and without pruning (Helix Table 8)."""
    rows = []
    for name in _ABLATED:
        case = problem(name, "70B")
        for how, links in (("with pruning", pruned(case)), ("without pruning", all_links(case))):
            row: list[object] = [name, how, int(links.sum())]
            for inferred in (False, True):
                size = Milp(case, links=links, partial_inference=inferred).size
                row += [size.total_variables, size.total_constraints]
            rows.append(row)
    columns = ["cluster", "links", "directed links", "variables", "constraints"]
    columns += [f"{what}, partial inference" for what in columns[3:]]
    return pd.DataFrame(rows, columns=columns)


def summary_frame(plans: Mapping[str, FlowPlan]) -> pd.DataFrame:
    """Our plans beside the best published placement, with the time that the benchmark recorded.

    The last columns are of the same plans gone on with, where nodes may start in the middle of
    their layers.
    """
    rows = []
    for name, plan in plans.items():
        theirs = judge(placement(REFERENCES[name])) if name in REFERENCES else np.nan
        cluster, model = name.split()
        seconds = timing(timing_key(cluster, model, plan.steps[-1].name)).seconds
        bound = plan.bound
        row = (name, plan.tokens_per_s, bound.tokens_per_s, 100 * plan.gap)
        partial = with_partial_inference(plan)
        more = partial.tokens_per_s, 100 * partial.gap
        rows.append((*row, bound.simple_tokens_per_s, theirs, seconds, *more))
    columns = ["setting", "flow [tokens/s]", "bound [tokens/s]", "gap [%]"]
    columns += ["bound by work [tokens/s]", "best published [tokens/s]", "recorded time [s]"]
    columns += ["with partial inference [tokens/s]", "its gap [%]"]
    return pd.DataFrame(rows, columns=columns)


def progress_figure(plans: Mapping[str, FlowPlan]) -> Figure:
    """Best placement and bound over time: the artifact's logs, and ours (Helix Fig. 12).

    Helix shows the small cluster, which comes first; red dots are an optimum that is proven.
    """
    logged = sorted((name for name in plans if name in REFERENCES), key=lambda n: "small" not in n)
    shape = -(-len(logged) // 2), min(len(logged), 2)
    size = (4.4 * shape[1], 2.9 * shape[0])
    fig, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat[: len(logged)][-shape[1] :]:
        ax.set_xlabel("solving time [s]")
    for ax in axes.flat[len(logged) :]:
        ax.remove()
    for name, ax in zip(logged, axes.flat, strict=False):
        plan, (cluster, model) = plans[name], name.split()
        time_s, incumbent, bound = solver_log(cluster)
        steps = [*plan.steps, plan.steps[-1]]
        keys = (timing_key(cluster, model, step.name) for step in plan.steps)
        seconds = [*np.maximum([timing(key).seconds for key in keys], 0.01), time_s[-1]]
        ours = [step.tokens_per_s or np.nan for step in steps[:-1]] + [steps[-1].tokens_per_s]
        for label, colour, at, bounds, best in (
            ("Gurobi", "#D55E00", np.maximum(time_s, 0.1), bound,
             np.where(incumbent > 1, incumbent, np.nan)),
            ("ours", "#0072B2", seconds, [step.bound for step in steps], ours),
            ("CP-SAT", "#009E73", *_searched(name)),
        ):  # fmt: skip
            style: dict[str, Any] = {"where": "post", "color": colour}
            ax.step(at, bounds, linestyle="--", label=f"{label}, bound", **style)
            ax.step(at, best, label=f"{label}, best", **style)
        if plan.proven:
            ax.axhline(plan.tokens_per_s, color="red", ls=":", lw=1.6, zorder=3, label="optimum")
        ax.set(xscale="log", yscale="log", title=name)
    for ax in axes[:, 0]:
        ax.set_ylabel("flow [tokens/s]")
    figures.shared_legend(fig, ncols=4)
    return fig


def _searched(setting: str) -> tuple[Floats, Floats, Floats]:
    rows = milp_frame().query("setting == @setting")
    time_s, best, bound = rows[["seconds", "tokens_per_s", "bound"]].to_numpy(np.float64).T
    return np.maximum(time_s, 0.1), bound, np.where(best > 1, best, np.nan)


def pipelines_frame(best: Flow, nodes: Sequence[Any], count: int = 8) -> pd.DataFrame:
    """Pipelines that carry most of a flow, by flow decomposition (Helix Fig. 4)."""
    return pd.DataFrame(
        [
            (" > ".join(nodes[k].name for k in path.nodes), len(path.nodes), path.tokens_per_s)
            for path in best.paths()[:count]
        ],
        columns=["pipeline", "nodes", "flow [tokens/s]"],
    )


def simulated(
    plans: Mapping[str, FlowPlan],
    source: TraceSource,
    window_s: tuple[float, float],
    seed: int,
    raw: bool = False,
) -> tuple[dict[str, PipelineRun], dict[str, Any]]:
    """Placements of LLaMA-70B served offline with Helix's scheduler, and what the flow uses.

    Published placements run as the artifact runs them, ours on all links; with ``raw`` times per
    layer are the published ones, else their knots. The use of each node by the maximum flow is
    given for the methods of Helix's Fig. 9.
    """
    serve = partial(run_offline, source=source, window_s=window_s, seed=seed)
    runs, use = {}, {}
    compared = {"single-24": METHODS, "geo-24": (*METHODS, "helix-no-prune")}
    for cluster, methods in (compared | {"hetero-42": ("helix", "helix-no-prune")}).items():
        for name in (f"{cluster} 70B {method}" for method in methods):
            network = artifact_network(name, raw=raw)
            runs[name] = serve(network, router("helix", "offline", artifact_flow(network)))
            if name.split()[2] in METHODS and cluster in compared:
                use[name] = network.max_flow().utilisation
        own = {}
        if cluster in compared:
            own["milp"] = solved(f"{cluster} 70B", raw=raw)
        if cluster in compared and f"{cluster} 70B" in plans:
            ranges = plans[f"{cluster} 70B"].best[0].placement.ranges
            own["ours"] = Placement(problem(cluster, "70B", raw=raw), ranges, "ours")
        for method, one in own.items():
            links = milp_links(one.problem) if method == "milp" else None
            flow, name = FlowNetwork(one, links=links).max_flow(), f"{cluster} 70B {method}"
            runs[name] = serve(flow.network, router("helix", "offline", flow.link_tokens_per_s))
            use[name] = flow.utilisation
    return runs, use


def methods_frame(runs: Mapping[str, PipelineRun], use: Mapping[str, Any]) -> pd.DataFrame:
    """Decode throughput by placement, printed and ours, and how busy nodes are (Helix Fig. 9)."""
    columns = ["cluster", "model", "placement", DECODED, *PRINTED]
    columns += ["over its simulator [%]", "time in batches [%]", "use by the flow [%]"]
    rows = []
    for name, used in use.items():
        decoded = runs[name].serving().decode_tps
        theirs, real = printed_tps(name, experiment="model_placement")
        shares = (100 * float(np.mean(share)) for share in (runs[name].node_use, used))
        rows.append((*name.split(), decoded, theirs, real, 100 * (decoded / theirs - 1), *shares))
    return pd.DataFrame(rows, columns=columns)


def method_bars_figure(table: pd.DataFrame) -> Figure:
    """Decode throughput by cluster and placement, printed and ours (Helix Fig. 9a)."""
    fig, axis = plt.subplots(figsize=(6.0, 3.0))
    sns.barplot(
        table, x="cluster", y=DECODED, hue="placement", palette=_COLOURS, saturation=1, ax=axis
    )
    placed, printed = table["placement"].unique(), table[[*PRINTED]].itertuples(index=False)
    of = dict(zip(zip(table["placement"], table["cluster"], strict=True), printed, strict=True))
    figures.mark_bars(axis, [[tuple(v) for (p, _), v in of.items() if p == one] for one in placed])
    axis.set_xticks([0, 1], ["single cluster", "geo-distributed"])
    axis.set_xlabel("")
    axis.margins(y=0.1)
    axis.legend(title="")
    return fig


def case_study_figure(runs: Mapping[str, PipelineRun]) -> Figure:
    """Published placements of LLaMA-70B on the single cluster: time in batches (Helix Fig. 9b)."""
    fig, axes = plt.subplots(3, 1, figsize=(9.0, 7.0))
    for method, ax in zip(METHODS, axes, strict=True):
        name = f"single-24 70B {method}"
        flow, busy = artifact_network(name).max_flow(), runs[name].node_use
        title = f"{method}: nodes are in batches for {100 * busy.mean():.0f} % of the time"
        placements.draw(flow, ax, title=title, legend=method == "helix", use=busy)
    return fig


def ablation(runs: Mapping[str, PipelineRun]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Decode throughput of placements found with and without pruning; time to the best objective.

    Each has a row per cluster. Times [s] are when the artifact's solver first had its best
    objective, with a heuristic start and without, by its logs.
    """
    decoded, reached = (pd.DataFrame(index=pd.Index(_ABLATED, name="cluster")) for _ in "12")
    for method, label in (("helix", "pruned"), ("helix-no-prune", "all links")):
        decoded[label] = [runs[f"{c} 70B {method}"].serving().decode_tps for c in _ABLATED]
    for start, label in (("", "heuristic start"), ("none", "no start")):
        reached[label] = [_first_best_s(cluster, start) for cluster in _ABLATED]
    return decoded, reached


def _first_best_s(cluster: str, start: str) -> float:
    time_s, incumbent, _ = solver_log(cluster, start=start)
    return float(time_s[np.argmax(incumbent >= incumbent.max() * (1 - 1e-6))])


def ablation_bars_figure(decoded: pd.DataFrame, reached_s: pd.DataFrame) -> Figure:
    """Pruning and starts by cluster (Helix Fig. 11)."""
    fig, axes = plt.subplots(1, 2, figsize=(8.0, 3.0))
    for ax, label, table, palette in (
        (axes[0], DECODED, decoded, figures.CYCLE[:2]),
        (axes[1], "time to the best [min]", reached_s / 60, figures.CYCLE[2:4]),
    ):
        rows = table.melt(ignore_index=False).reset_index()
        sns.barplot(
            rows, x="cluster", y="value", hue="variable", palette=palette, saturation=1, ax=ax
        )
        ax.set_xticks([0, 1], ["24 nodes", "42 nodes"])
        ax.set(xlabel="", ylabel=label)
        ax.legend(title="")
    return fig


def throughput_claims(table: pd.DataFrame, protocol: str) -> Rows:
    """Claims 11 and 12."""
    decoded = table.set_index(["cluster", "placement"])[DECODED]
    rows: Rows = []
    for number, cluster in ((11, "single-24"), (12, "geo-24")):
        for letter, other in (("a", "petals"), ("b", "swarm")):
            run, theirs = (
                decoded[cluster, method] / decoded[cluster, other] for method in ("milp", "helix")
            )
            note = f"the program as solved here, {protocol}; the published placement {theirs:.2f}"
            rows += claim_rows("helix", "fig9a_methods", note, {f"{number}{letter}": run})
    return rows


def size_claims(table8: pd.DataFrame) -> Rows:
    """Claims 16 and 32."""
    cells = table8.set_index(["links", "cluster"]).to_dict("index")
    note = "counted from the program of section 4.4 without partial inference"
    counts = (
        int(cells[how, name][what])
        for how in ("with pruning", "without pruning")
        for name in _ABLATED
        for what in ("variables", "constraints")
    )
    numbers = dict(zip((f"16{letter}" for letter in "abcdefgh"), counts, strict=True))
    rows = claim_rows("helix", "table8_sizes", note, numbers)
    for first, second, name in (("16i", "32a", "geo-24"), ("16j", "32b", "hetero-42")):
        few, many = (cells[f"{how} pruning", name] for how in ("with", "without"))
        variables, links = (
            float(100 * (1 - few[what] / many[what])) for what in ("variables", "directed links")
        )
        note = f"{many['directed links']} to {few['directed links']} directed links, those of the "
        note += "coordinator included, as the variables of Table 8 imply"
        rows += claim_rows("helix", "table8_sizes", "of the variables", {first: variables})
        rows += claim_rows("helix", "table8_sizes", note, {second: links})
    return rows


def ablation_claims(decoded: pd.DataFrame, reached_s: pd.DataFrame, protocol: str) -> Rows:
    """Claim 17."""
    logs = (
        "read off the artifact's solver logs (when the best objective first stood there), not "
        "measured anew; our planner needs no start"
    )
    rows: Rows = []
    for first, second, name in zip("ab", "cd", _ABLATED, strict=True):
        tps, time_s = (table.to_dict("index")[name] for table in (decoded, reached_s))
        gain = {f"17{first}": 100 * (tps["pruned"] / tps["all links"] - 1)}
        rows += claim_rows("helix", "fig11_ablation", f"published placements, {protocol}", gain)
        saved = {f"17{second}": 100 * (1 - time_s["heuristic start"] / time_s["no start"])}
        rows += claim_rows("helix", "fig11_ablation", logs, saved)
    return rows


def plan_claims(plans: Mapping[str, FlowPlan]) -> Rows:
    """Claims 18, 19 and 29, as far as their settings are planned."""
    rows: Rows = []
    if small := plans.get("small-10 30B"):
        recorded = timing(timing_key("small-10", "30B", small.steps[-1].name))
        note = f"our planner finds {small.tokens_per_s:.3f} tokens/s and proves it optimal "
        note += f"({100 * small.gap:.4f} % to the bound); {recorded.note}"
        rows += claim_rows("helix", "fig12_progress", note, {"18": recorded.seconds / 60})
    geo, *others = (
        FlowNetwork(placement(f"{name}")).max_flow().depth
        for name in ("geo-24 70B helix", "geo-24 70B swarm", "single-24 70B helix")
    )
    for number, other in zip(("19a", "19b"), others, strict=True):
        note = f"mean nodes per token under the maximum flow: {geo:.1f} against {other:.1f}"
        rows += claim_rows("helix", "published_flows", note, {number: 100 * (1 - geo / other)})
    for number, name in (("29a", "single-24 30B"), ("29b", "geo-24 30B")):
        if name in plans:
            plan, best = plans[name], plans[name].best[0]
            kinds = [node.kind.name for node in plan.problem.nodes]
            mixed = [p for p in best.flow.paths() if len({kinds[k] for k in p.nodes}) > 1]
            note = (
                f"our best placement, {best.tokens_per_s:,.0f} tokens/s (bound "
                f"{plan.bound.tokens_per_s:,.0f}), mixes types; one pipeline per type, as Helix "
                "planned them separately, is not the largest flow under its own node throughputs"
            )
            rows += claim_rows("helix", "our_plans", note, {number: len(mixed)})
    return rows


def drawn_claims(runs: Mapping[str, PipelineRun], use: Mapping[str, Any], protocol: str) -> Rows:
    """Claims 11, 12, 17 and 30, which rest on a draw of requests."""
    return [
        *throughput_claims(methods_frame(runs, use), protocol),
        *ablation_claims(*ablation(runs), protocol),
        *use_claims(runs, use, protocol),
    ]


def use_claims(runs: Mapping[str, PipelineRun], flow_use: Mapping[str, Any], protocol: str) -> Rows:
    """Claim 30: how the placements of LLaMA-70B use the nodes of the single cluster."""
    names = {method: f"single-24 70B {method}" for method in RUN}
    decoded = {method: runs[name].serving().decode_tps for method, name in names.items()}
    use = {method: flow_use[name] for method, name in names.items()}
    busy = {method: runs[name].node_use for method, name in names.items()}
    gpu = np.array([node.kind.gpu for node in problem("single-24", "70B").nodes])
    swarm: Placement = placement(names["swarm"])
    last = np.array([held is not None and held[1] == 80 for held in swarm.ranges])
    fast = np.isin(gpu, ("A100-SXM-40GB", "L4")) & ~last
    t4 = gpu == "T4"

    def order(values: Mapping[str, float]) -> str:
        names = {m: "Helix" if m == "milp" else m.capitalize() for m in values}
        return ">".join(names[m] for m in sorted(values, key=lambda m: -values[m]))

    def waiting(share: Mapping[str, Any]) -> float:
        return float(100 * (share["swarm"][last].mean() - share["swarm"][fast].mean()))

    def slow(share: Mapping[str, Any]) -> float:
        return float(100 * (share["petals"][t4].mean() - share["milp"][t4].mean()))

    def means(share: Mapping[str, Any]) -> str:
        return order({method: values.mean() for method, values in share.items()})

    theirs = decoded | {"milp": runs["single-24 70B helix"].serving().decode_tps}
    note = f"the program as solved here, {protocol}; with the published placement {order(theirs)}"
    rows = claim_rows("helix", "fig9a_methods", note, {"30a": order(decoded)})
    note = "share of time in batches, as simulated; by the share of a node's throughput that the "
    note += "maximum flow takes: "
    for number, value, other in (
        ("30b", waiting(busy), f"{waiting(use):.1f} points"),
        ("30c", slow(busy), f"{slow(use):.1f} points"),
        ("30d", means(busy), means(use)),
    ):
        rows += claim_rows("helix", "fig9b_case", f"{note}{other}", {number: value})
    return rows
