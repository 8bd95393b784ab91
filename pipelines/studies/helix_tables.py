"""Makes our own tables of Helix's machines, links and placements from its artifact.

``hetero tables`` compares what is committed with what comes out; it needs the published files
(``hetero data fetch``, or ``HETERO_DATA_MIRROR``).
"""

from __future__ import annotations

import configparser
from collections.abc import Callable

import pandas as pd

from hetero.cluster import cluster
from hetero.workload import datasets
from pipelines.studies.helix_artifact import CLUSTERS, COORDINATOR

_GPUS = {"a100": "A100-SXM-40GB", "v100": "V100-16GB", "l4": "L4", "t4": "T4"}
_LLMS = {"llama1_30b": "LLaMA-1-30B", "llama2_70b": "Llama-2-70B"}

#: Layers on a node at the operating point of its throughput (artifact, model manager).
_TYPICAL = {
    "llama2_70b": {"a100": 8, "v100": 3, "l4": 4, "l4x2": 9, "t4": 3, "t4x2": 6, "t4x4": 12},
    "llama1_30b": {"a100": 12, "v100": 4, "l4": 8, "l4x2": 14, "t4": 4, "t4x2": 10, "t4x4": 20},
}
_FILES = {
    "single-24": "cluster24.ini",
    "geo-24": "3cluster24.ini",
    "hetero-42": "cluster42.ini",
    "small-10": "cluster10.ini",
}
_UNITS = {"mbps": 1.0, "gbps": 1e3, "kbps": 1e-3, "MilliSec": 1.0, "Sec": 1e3}

# Cluster, model, method, file of the artifact, objective it prints, kinds where not all nodes.
_PLACEMENTS = """
single-24 70B helix single/70b/ilp/ilp_sol 1289.555770275 -
single-24 70B petals single/70b/petals/petals_sol 531.703 -
single-24 70B swarm single/70b/swarm/swarm_sol - -
single-24 70B separate-a100 single/70b/separate/a100_solution_file - a100
single-24 70B separate-l4 single/70b/separate/l4_solution_file - l4
single-24 70B separate-t4 single/70b/separate/t4_solution_file - t4
single-24 70B helix-scheduling request_scheduling/layout_single/ilp_sol - -
single-24 30B petals single/30b/petals/petals_sol - -
single-24 30B swarm single/30b/swarm/swarm_sol - -
single-24 30B helix-a100 single/30b/ilp/a100/ilp_sol - a100
single-24 30B helix-l4 single/30b/ilp/l4/ilp_sol - l4
single-24 30B helix-t4 single/30b/ilp/t4/ilp_sol - t4
geo-24 70B helix geo/70b/ilp/ilp_sol 1212.17684546 -
geo-24 70B helix-no-start ablation/layouts/raw_24/ilp_sol 1212.176848723 -
geo-24 70B helix-no-prune ablation/layouts/no_prune_24/ilp_sol 952.1073984851 -
geo-24 70B helix-scheduling request_scheduling/layout_distributed/ilp_sol - -
geo-24 70B petals geo/70b/petals/petals_sol - -
geo-24 70B swarm geo/70b/swarm/swarm_sol 616.455 -
geo-24 70B separate-a100 geo/70b/separate/a100_solution_file - a100
geo-24 70B separate-l4 geo/70b/separate/l4_solution_file - l4
geo-24 70B separate-t4 geo/70b/separate/t4_solution_file - t4
geo-24 30B petals geo/30b/petals/petals_sol - -
geo-24 30B swarm geo/30b/swarm/swarm_sol - -
geo-24 30B helix-a100 geo/30b/ilp/a100/ilp_sol - a100
geo-24 30B helix-l4 geo/30b/ilp/l4/ilp_sol - l4
geo-24 30B helix-t4 geo/30b/ilp/t4/ilp_sol - t4
geo-24 30B separate-a100 geo/30b/separate/a100_solution_file - a100
geo-24 30B separate-l4 geo/30b/separate/l4_solution_file - l4
geo-24 30B separate-t4 geo/30b/separate/t4_solution_file - t4
hetero-42 70B helix hetero/70b/ilp/ilp_sol 4137.547585398 -
hetero-42 70B helix-no-prune ablation/layouts/no_prune_42/ilp_sol 4892.242432209 -
hetero-42 70B petals hetero/70b/petals/petals_sol - -
hetero-42 70B swarm hetero/70b/swarm/swarm_sol 4892.24 -
hetero-42 70B separate-a100 hetero/70b/separate/a100/solution_file - a100
hetero-42 70B separate-l4 hetero/70b/separate/l4/solution_file - l4
hetero-42 70B separate-l4x2 hetero/70b/separate/l4x2/solution_file - l4x2
hetero-42 70B separate-t4x2 hetero/70b/separate/t4x2/solution_file - t4x2
hetero-42 70B separate-t4x4 hetero/70b/separate/t4x4/solution_file - t4x4
hetero-42 70B separate-v100-t4 hetero/70b/separate/v100_t4/solution_file - v100,t4
small-10 30B helix ablation/layouts/quality/ilp_sol 286.5874097546 -
"""
_FOLDERS = {
    "single": "single_cluster/layout_llama",
    "geo": "distributed_clusters/layout_llama",
    "hetero": "high_heterogeneity/layout_llama",
}


def machine_limits_frame() -> pd.DataFrame:
    """KV cache and batch limits over the number of layers, catalog names inside."""
    frame = pd.read_csv(datasets.path("helix_machine_model_limits"))
    parts = frame["machine"].str.extract(r"^(?P<name>.+?)(?:x(?P<count>\d+))?$")
    typical = [
        int(_TYPICAL[model][machine] == layers)
        for model, machine, layers in zip(
            frame["model"], frame["machine"], frame["layers_on_node"], strict=True
        )
    ]
    return pd.DataFrame(
        {
            "gpu": parts["name"].map(_GPUS),
            "llm": frame["model"].map(_LLMS),
            "tensor_parallel": parts["count"].fillna("1").astype(int),
            "layers": frame["layers_on_node"],
            "kv_blocks": frame["vllm_num_blocks"],
            "prompt_max_requests": frame["prompt_max_requests"],
            "decode_max_requests": frame["decode_max_tokens"],
            "typical": typical,
        }
    )


def geo_links_frame() -> pd.DataFrame:
    """Links of the geo-distributed cluster; between nodes one row for both directions."""
    config = _config("geo-24")
    names = {str(k): name for k, name in _names("geo-24").items()}
    names |= {"source": COORDINATOR, "sink": COORDINATOR}
    rows = []
    for section in config.sections():
        kind, *ends = section.split("-")
        if kind == "Link":
            rows.append(
                (
                    *(names[end] for end in ends),
                    _quantity(config[section]["bandwidth"]),
                    _quantity(config[section]["latency"]),
                )
            )
    return pd.DataFrame(rows, columns=["start", "end", "mbyte_s", "latency_ms"])


def placements_frame() -> pd.DataFrame:
    """Every distinct placement, one row each, under the node names of our cluster files."""
    rows = []
    for line in _PLACEMENTS.strip().splitlines():
        name, model, method, short, objective, kinds = line.split()
        folder, _, rest = short.partition("/")
        file = _FOLDERS[folder] + rest if folder in _FOLDERS else short
        config = configparser.ConfigParser()
        config.read(datasets.path("helix_placements", f"{file.replace('/', '__')}.ini"))
        offset = int(config["Settings"]["offset"])
        nodes = _names(name)
        if kinds != "-":
            # Clusters of one type number its nodes from 0, in the order of ours.
            order = [machine.name for machine in cluster(CLUSTERS[name]).machines]
            nodes = dict(
                enumerate(n for kind in kinds.split(",") for n in order if _kind(n) == kind)
            )
        held = {}
        for key, text in config["Solution"].items():
            layers = [int(part) for part in text.strip("[] ").split(",")]
            held[nodes[int(key.rsplit("_", 1)[1]) - offset]] = f"{layers[0]}-{layers[-1] + 1}"
        rows.append(
            {
                "cluster": name,
                "model": model,
                "method": method,
                "tokens_per_s": objective.strip("-"),
                "alone": int(kinds != "-"),
                "source": f"artifact_evaluation/{file}.ini",
                "layers": " ".join(f"{node}:{layers}" for node, layers in sorted(held.items())),
            }
        )
    return pd.DataFrame(rows)


def nodes_frame() -> pd.DataFrame:
    """The artifact's number of every node of our cluster files."""
    rows = [
        (name, number, node)
        for name in ("single-24", "geo-24", "hetero-42")
        for number, node in sorted(_names(name).items())
    ]
    return pd.DataFrame(rows, columns=["cluster", "number", "node"])


def solver_logs_frame() -> pd.DataFrame:
    """Incumbent and bound over time of the artifact's solver runs, thinned.

    Kept are the first and last line of every run, and lines at which the incumbent grows or the
    bound has fallen by at least 1 %.
    """
    frame = pd.read_csv(datasets.path("helix_gurobi_traces"))
    kept = []
    for _, log in frame.groupby("run", sort=False):
        best, least = -1.0, float("inf")
        for index, incumbent, bound in zip(log.index, log["incumbent"], log["bound"], strict=True):
            if incumbent > best * (1 + 1e-6) or bound <= 0.99 * least or index == log.index[-1]:
                best, least = max(best, incumbent), min(least, bound)
                kept.append(index)
    return frame.loc[kept]


def expected_frame() -> pd.DataFrame:
    """Decode throughput and latencies that the artifact prints, simulated and from its cluster."""
    frame = pd.read_csv(datasets.path("helix_expected"))
    where = frame["setting"].str.extract(r"^(\w+)/(\w+)/(simulation|prototype)$")
    mine = frame["metric"].str.match(r"decode_throughput|(prompt|decode)_latency")
    kept = where.notna().all(axis=1) & mine & ~frame["method"].str.contains("_a100|_l4|_t4")
    frame, where = frame[kept], where[kept]
    names = {"single24": "single-24", "geo24": "geo-24", "hetero42": "hetero-42"}
    # "stated" and "sum of sub-clusters" are the whole method, in the text beside its parts.
    table = pd.DataFrame(
        {
            "experiment": frame["experiment"],
            "cluster": where[0].map(names),
            "model": frame["model"].str.extract(r"(\d+B)")[0],
            "method": frame["method"].str.replace(r" \(.*\)", "", regex=True),
            "mode": where[1],
            "run": where[2],
            "metric": frame["metric"],
            "value": frame["value"],
            "source": frame["source_file"],
        }
    )
    keys = ["experiment", "cluster", "model", "method", "mode", "run", "metric"]
    return table.drop_duplicates(keys, keep="last")


def _config(name: str) -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(datasets.path("helix_config", _FILES[name]))
    return config


def _names(name: str) -> dict[int, str]:
    """Our name of every node of the artifact: the next of its type, in its region."""
    config = _config(name)
    free = [machine.name for machine in cluster(CLUSTERS[name]).machines]
    found = {}
    for k in range(int(config["NodeNames"]["total_compute_nodes"])):
        kind = config[f"ComputeNode-{k}"]["type"].lower()
        fitting = [n for n in free if _kind(n) == kind]
        if name == "geo-24" and kind != "a100":
            # Nodes 4 to 13 are the second region, the rest the third.
            sizes = {"l4": ("small", "large"), "t4": ("large", "small")}[kind]
            fitting = [n for n in fitting if sizes[int(k >= 14)] in n]
        found[k] = fitting[0]
        free.remove(fitting[0])
    return found


def _kind(node: str) -> str:
    """Machine type in the name of one of our nodes."""
    return node.split("-")[0]


def _quantity(text: str) -> float:
    """Number in Mbyte/s or ms: the artifact's mbps count bytes."""
    number, _, unit = text.partition("*")
    return float(number) * _UNITS[unit.strip()]


FILES: dict[str, Callable[[], pd.DataFrame]] = {
    "measured/helix_machine_limits": machine_limits_frame,
    "published/helix_expected": expected_frame,
    "published/helix_geo_links": geo_links_frame,
    "published/helix_nodes": nodes_frame,
    "published/helix_placements": placements_frame,
    "published/helix_solver_logs": solver_logs_frame,
}
