"""The two mixed fleets of MLPerf, simulated as they are: what mixing loses, and what would not.

Llama-2-70B in fp8 on machines of eight GPUs, each GPU a replica. ``data/measured/mixed_fleets.csv``
has what was measured of fleets and parts (:func:`fleets_frame`): tokens per second, and of a fleet
their ratio to the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
import pandas as pd

from hetero.catalog import gpu, llm
from hetero.deployment import Deployment, Replica
from hetero.engines import EngineSpec
from hetero.latency.frames import derived_frame
from hetero.routers import Builtin, Oracle, WeightedRoundRobin, factories
from hetero.simulator import simulate
from hetero.simulator.run import Run
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.studies.servers import read, share_gpt

FLEETS: Final = {
    "32 MI300X + 16 MI325X": {"MI300X": 32, "MI325X": 16},
    "16 MI325X + 8 MI300X": {"MI325X": 16, "MI300X": 8},
}
SPLITS: Final = ("static", "as served")
"""Offline, all queries wait from the start: split among replicas at once, or handed out as each has
room for one more (a closed loop of as many clients as fit the batches)."""
_PARTS: Final = {  # platforms that a fleet is the sum of, and how many of each
    "32 MI300X + 16 MI325X": {"8xMI300X_2xEPYC_9534": 4, "8xMI325X_2xEPYC_9655": 2},
    "16 MI325X + 8 MI300X": {"16xMI325X_2xEPYC_9575F": 1, "8xMI300X_2xEPYC_9534": 1},
}
_PLATFORMS: Final = {
    "32 MI300X + 16 MI325X": "32xMI300X_2xEPYC_9534_16xMI325X_2xEPYC_9655",
    "16 MI325X + 8 MI300X": "16xMI325X_8xMI300X_2xEPYC_9575F",
}
_TTFT_S, _TPOT_S = 2.0, 0.2  # at the 99th percentile, of Server
_MEANS: Final = (294.0, 301.0)  # input tokens (assumed) and output tokens of a request
_BATCH: Final = 1024


def fleets_frame() -> pd.DataFrame:
    """Ratios of fleets to the sums of their parts, from the published runs.

    Columns: fleet, scenario, ``ratio`` of tokens per second, ``asked`` the same of the rates that
    requests were sent at (Server), ``span_s`` of the run (Offline: of its 99th percentile, as
    queries end evenly), and ``doubled``: what two machines of a part reach of twice one.
    """
    frame = read("mlperf_v4.1_v5.1.csv")
    frame = frame[frame["submitter"].str.contains("MangoBoost|Supermicro")]
    rows = []
    for name, parts in _PARTS.items():
        for scenario in ("Offline", "Server"):
            at = frame[frame["scenario"] == scenario].set_index("platform")
            one, doubled = at.loc[_PLATFORMS[name]], []
            for pair, single in (
                ("16xMI300X_4xXeon_8460Y", "8xMI300X_2xXeon_8460Y"),
                ("16xMI325X_2xEPYC_9575F", "8xMI325X_2xEPYC_9575F"),
            ):
                doubled.append(at["tokens_per_s"][pair] / (2 * at["tokens_per_s"][single]))
            ratios = (
                one[column] / sum(count * at[column][part] for part, count in parts.items())
                for column in ("tokens_per_s", "scheduled_per_s")
            )
            span_s = one["e2e_p99_ms"] / 990.0 if scenario == "Offline" else np.nan
            rows.append((name, scenario, *ratios, span_s, *doubled))
    columns = ["fleet", "scenario", "ratio", "asked", "span_s", "MI300X_doubled", "MI325X_doubled"]
    return pd.DataFrame(rows, columns=columns).round(4)


def measured_frame() -> pd.DataFrame:
    """The table that is kept of them."""
    return derived_frame("mixed_fleets")


@cache
def replica(name: str) -> Replica:
    """A GPU with the model, as every command takes it."""
    of, model = gpu(name), llm("Llama-2-70B")
    engine = EngineSpec(precision="fp8", kv_precision="fp8", max_batch=_BATCH, max_step_tokens=8192)
    (found,) = engine.on(of, model).replicas(name)
    return found


def fleet(counts: dict[str, int]) -> Deployment:
    """So many GPUs of each type, a replica each."""
    every = (
        replace(replica(name), name=f"{name} {k}") for name, n in counts.items() for k in range(n)
    )
    return Deployment(" + ".join(f"{n} {name}" for name, n in counts.items()), tuple(every))


def requests(count: int) -> Trace:
    """Lengths as of OpenOrca, all at once."""
    return Trace(np.zeros(count), *share_gpt(count, *_MEANS), name="OpenOrca")


def tokens_per_s(run: Run) -> float:
    """Output tokens from the first arrival to the last finish."""
    return float(run.trace.output_tokens.sum()) / run.span_s


def offline(counts: dict[str, int], router: Builtin, split: str, per_gpu: int) -> float:
    """Output tokens per second of ``per_gpu`` requests for each GPU; see :data:`SPLITS`."""
    gpus = sum(counts.values())
    trace = requests(per_gpu * gpus)
    if split == "as served":
        trace = trace.closed_loop(_BATCH * gpus)
    return tokens_per_s(simulate(fleet(counts), trace, router, predictor=Oracle()))


def server(
    counts: dict[str, int], router: Builtin, span_s: float, halvings: int = 7
) -> tuple[float, float]:
    """Largest Poisson rate [requests/s] whose P99 targets hold, and output tokens per second."""
    deployment, best = fleet(counts), (0.0, 0.0)
    low, high = 4.0 * len(deployment.replicas), 20.0 * len(deployment.replicas)
    for _ in range(halvings):
        rate = 0.5 * (low + high)
        trace = requests(int(rate * span_s)).poisson(rate, stream(0, "server"))
        run = simulate(deployment, trace, router, predictor=Oracle())
        tails = np.nanpercentile(run.ttft_s, 99), np.nanpercentile(run.tpot_s, 99)
        if run.finished.all() and tails[0] <= _TTFT_S and tails[1] <= _TPOT_S:
            low, best = rate, (rate, tokens_per_s(run))
        else:
            high = rate
    return best


def routers(counts: dict[str, int], names: list[str]) -> Iterator[tuple[str, Builtin]]:
    """Routers by name; ``planned shares`` gives each GPU what it reaches alone, as planned."""
    for name in names:
        if name != "planned shares":
            yield name, factories()[name]()
            continue
        alone = {
            one: offline({one: 1}, factories()["round-robin"](), "static", 2000) for one in counts
        }
        yield name, WeightedRoundRobin([alone[one] for one, n in counts.items() for _ in range(n)])


def ratios_frame(names: list[str], per_gpu: int, span_s: float, halvings: int) -> pd.DataFrame:
    """Simulated ratio of every fleet to the sum of its parts, by scenario, split and router.

    ``asked`` is the ratio of the rates that requests come at (Server).
    """
    plain, rows = factories()["round-robin"], []
    for title, counts in FLEETS.items():
        lone = [({one: 8}, n // 8) for one, n in counts.items()]
        whole = sum(k * offline(part, plain(), "static", per_gpu) for part, k in lone)
        rates = [(k, server(part, plain(), span_s, halvings)) for part, k in lone]
        asked, reached = (sum(k * found[i] for k, found in rates) for i in (0, 1))
        for name, router in routers(counts, names):
            for split in SPLITS:
                ratio = offline(counts, router, split, per_gpu) / whole
                rows.append((title, f"Offline, {split}", name, ratio, np.nan))
            rate, tokens = server(counts, router, span_s, halvings)
            rows.append((title, "Server", name, tokens / reached, rate / asked))
    return pd.DataFrame(rows, columns=["fleet", "scenario", "router", "ratio", "asked"])


def comparison_frame(simulated: pd.DataFrame) -> pd.DataFrame:
    """Simulated ratios less those measured (``off``), nearest first in each fleet and scenario."""
    found = simulated.assign(of=simulated["scenario"].str.partition(",")[0])
    real = measured_frame()[["fleet", "scenario", "ratio"]]
    real = real.rename(columns={"scenario": "of", "ratio": "measured"})
    found = found.merge(real, on=["fleet", "of"]).drop(columns="of")
    found = found.assign(off=found["ratio"] - found["measured"])
    return found.sort_values(
        ["fleet", "scenario", "off"], key=lambda x: x.abs() if x.name == "off" else x
    )
