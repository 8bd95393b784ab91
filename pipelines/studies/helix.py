"""Helix's experiments: which placements, routers, rates and feeds make up each published result.

The artifact runs one simulation per pipeline where a method keeps GPU types apart, and adds them
up. Rates and numbers of requests in flight are those its scripts set by hand.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hetero import workload
from hetero.arrays import Floats, Ints
from hetero.errors import ParameterError
from hetero.intervals import interval
from hetero.placement.network import FlowNetwork
from hetero.routers.pipelines import (
    FlowRouter,
    PipelineRouter,
    RandomRouter,
    ShortestQueueRouter,
    SwarmRouter,
)
from hetero.simulator.pipeline_run import OFFLINE_S, PipelineRun, WindowFigures, combine
from hetero.simulator.pipelines import Feed, simulate_pipelines
from hetero.workload import Trace, TraceSource, datasets
from pipelines.studies.helix_artifact import Mode, artifact_flow, artifact_network

ONLINE_S = 1800.0
"""Test of 30 minutes (Helix section 6.2)."""
WARM_UP_S = 30.0
"""Warm-up of online serving (Helix section 6.2); the artifact has none."""
PEAK_SHARE = 0.75
"""Online rate over the peak (Helix section 6.2)."""

# Cluster, model, method: placement, requests in flight offline, tokens per second offered online.
_PARTS = """
single-24 30B helix: helix-a100 20 600, helix-l4 20 200, helix-t4 20 170
single-24 30B swarm: swarm 50 450
single-24 30B separate: helix-a100 30 500, helix-l4 25 150, helix-t4 25 150
geo-24 30B helix: helix-a100 20 560, helix-l4 20 140, helix-t4 20 140
geo-24 30B swarm: swarm 60 380
geo-24 30B separate: separate-a100 35 520, separate-l4 40 100, separate-t4 40 140
single-24 70B helix: helix 20 700
single-24 70B swarm: swarm 180 350
single-24 70B separate: separate-a100 18 240, separate-l4 40 120, separate-t4 3 10
geo-24 70B helix: helix 20 320
geo-24 70B swarm: swarm 180 160
geo-24 70B separate: separate-a100 1 1, separate-l4 60 120, separate-t4 50 60
hetero-42 70B helix: helix 20 2150
hetero-42 70B swarm: swarm 500 1450
hetero-42 70B separate: separate-a100 1 1, separate-l4 60 140, separate-l4x2 35 160, \
separate-t4x4 110 350
hetero-42 70B sp_plus: separate-a100 1 1, separate-l4 60 140, separate-l4x2 35 160, \
separate-t4x4 110 350, separate-v100-t4 90 200
"""

SETTINGS = (
    ("single-24", "30B"),
    ("single-24", "70B"),
    ("geo-24", "30B"),
    ("geo-24", "70B"),
    ("hetero-42", "70B"),
)
"""Clusters and models of Helix's Fig. 6 to 8."""


@dataclass(frozen=True, slots=True)
class ServedPart:
    """A cluster, or the nodes of one type in it, that serves on its own.

    Attributes
    ----------
    in_flight
        Requests in flight in closed loop, for routers that count; at the start for Helix's.
    offered_tps
        Prompt and output tokens per second that the artifact offers online.
    """

    placement: str
    in_flight: int
    offered_tps: float


@dataclass(frozen=True, slots=True)
class ServedMethod:
    """A method on a cluster."""

    cluster: str
    model: str
    method: str
    parts: tuple[ServedPart, ...]

    @property
    def name(self) -> str:
        """``"<cluster> <model> <method>"``."""
        return f"{self.cluster} {self.model} {self.method}"


@lru_cache(maxsize=1)
def cases() -> dict[str, ServedMethod]:
    """Every method of Helix's Fig. 6 to 8 by its name, such as ``"geo-24 70B swarm"``.

    Examples
    --------
    >>> [part.in_flight for part in cases()["single-24 70B separate"].parts]
    [18, 40, 3]
    """
    found = {}
    for line in _PARTS.strip().splitlines():
        name, _, rest = line.partition(": ")
        cluster, model, method = name.split()
        parts = tuple(
            ServedPart(f"{cluster} {model} {which}", int(count), float(rate))
            for which, count, rate in (part.split() for part in rest.split(", "))
        )
        found[name] = ServedMethod(cluster, model, method, parts)
    return found


def router(method: str, mode: Mode, flow: Floats | None = None) -> PipelineRouter:
    """The router of a method, as the artifact sets it offline or online."""
    if method in ("helix", "petals", "flow"):
        return FlowRouter.offline(flow) if mode == "offline" else FlowRouter(flow=flow)
    if method == "swarm":
        return SwarmRouter()
    if method == "shortest queue":
        return ShortestQueueRouter()
    if method in ("separate", "sp_plus", "random"):
        return RandomRouter()
    raise ParameterError(
        f"Helix has no method '{method}'.",
        resolve="use helix, petals, swarm, separate, sp_plus, random or shortest queue.",
    )


# Requests -------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _pool(source: TraceSource) -> Trace:
    pool = workload.load("azure2023_conv", source)
    return pool.filter(input_tokens=(4, 2048), output_tokens=(0, 1024))


@lru_cache(maxsize=4)
def _bins(source: TraceSource) -> Ints:
    """Arrivals in 1200 equal parts; with the real trace the artifact's own, where they are here."""
    if source == "real" and datasets.available("helix_arrivals"):
        return np.loadtxt(datasets.path("helix_arrivals"), skiprows=1, dtype=np.int64)
    arrival = _pool(source).arrival_s
    parts = np.minimum(arrival / arrival[-1] * 1200, 1199).astype(np.int64)
    return np.bincount(parts, minlength=1200)


def mean_tokens(source: TraceSource) -> tuple[float, float]:
    """Mean input and output of the filtered conversation trace."""
    pool = _pool(source)
    return float(pool.input_tokens.mean()), float(pool.output_tokens.mean())


def _draw(pool: Trace, index: list[int], arrival_s: Any) -> Trace:
    # The artifact decodes once per output token after the prompt, so one token more than we do.
    return Trace(
        arrival_s,
        pool.input_tokens[index],
        pool.output_tokens[index] + 1,
        name=pool.name,
        source=pool.source,
    )


def offline_requests(source: TraceSource, count: int = 8000, seed: int = 0) -> Trace:
    """Lengths in the order in which the artifact draws them.

    They come from Python's own generator, so that with the real trace the requests are the very
    ones that it simulated.
    """
    rng, pool = random.Random(seed), _pool(source)
    index = [rng.randint(0, len(pool) - 1) for _ in range(count)]
    return _draw(pool, index, np.zeros(count))


def online_requests(
    source: TraceSource, offered_tps: float, duration_s: float = ONLINE_S, seed: int = 0
) -> Trace:
    """Arrivals by 3-s bins of the trace, drawn anew and scaled to a mean rate (artifact).

    Parameters
    ----------
    offered_tps
        Prompt and output tokens per second; where they bring no request, one comes all the same.
    """
    rng, pool, bins = random.Random(seed), _pool(source), _bins(source)
    factor = 3.0 * offered_tps / sum(mean_tokens(source)) / float(bins.mean())
    arrivals: list[float] = []
    index: list[int] = []
    rest = 0.0
    for k in range(int(duration_s) // 3):
        wanted = factor * float(bins[rng.randint(0, len(bins) - 1)]) + rest
        count = round(wanted)
        rest = wanted - count
        arrivals += sorted(3.0 * k + 3.0 * rng.random() for _ in range(count))
        index += [rng.randint(0, len(pool) - 1) for _ in range(count)]
    if not arrivals:
        arrivals, index = [duration_s / 2], [rng.randint(0, len(pool) - 1)]
    return _draw(pool, index, np.array(arrivals))


# Runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """A case that has been run: its parts, and what they serve together."""

    name: str
    mode: Mode
    runs: tuple[PipelineRun, ...]
    serving: WindowFigures


def run_offline(
    network: FlowNetwork,
    chosen: PipelineRouter,
    source: TraceSource,
    *,
    in_flight: int = 20,
    window_s: tuple[float, float] = OFFLINE_S,
    seed: int = 0,
) -> PipelineRun:
    """One cluster kept full: by KV cache where the router keeps records of it, else by number."""
    return simulate_pipelines(
        network,
        offline_requests(source, seed=seed),
        chosen,
        feed=Feed(first=in_flight, by="kv" if chosen.reserves else "count"),
        window_s=window_s,
        until_s=window_s[1],
        seed=seed,
    )


def run_online(
    network: FlowNetwork,
    chosen: PipelineRouter,
    source: TraceSource,
    offered_tps: float,
    *,
    warm_up_s: float = 0.0,
    duration_s: float = ONLINE_S,
    seed: int = 0,
) -> PipelineRun:
    """One cluster under the arrivals of the trace; requests are simulated to their end."""
    end = warm_up_s + duration_s
    return simulate_pipelines(
        network,
        online_requests(source, offered_tps, end, seed),
        chosen,
        window_s=(warm_up_s, end),
        seed=seed,
    )


def run(
    case: ServedMethod,
    mode: Mode,
    source: TraceSource,
    *,
    raw: bool = False,
    offered_tps: tuple[float, ...] | None = None,
    warm_up_s: float = 0.0,
    offline_s: tuple[float, float] = OFFLINE_S,
    online_s: float = ONLINE_S,
    seed: int = 0,
) -> Result:
    """Run a published case with its placements and routers.

    Parameters
    ----------
    offered_tps
        Tokens per second that each part is offered online, by default as the artifact sets them.
    """
    runs = []
    for k, part in enumerate(case.parts):
        network = artifact_network(part.placement, raw=raw)
        flow = artifact_flow(network) if case.method in ("helix", "petals") else None
        served = network, router(case.method, mode, flow), source
        if mode == "offline":
            made = run_offline(*served, in_flight=part.in_flight, window_s=offline_s, seed=seed)
        else:
            rate = part.offered_tps if offered_tps is None else offered_tps[k]
            made = run_online(*served, rate, warm_up_s=warm_up_s, duration_s=online_s, seed=seed)
        runs.append(made)
    found = tuple(runs)
    return Result(case.name, mode, found, combine(case.name, found))


def peak_tps(served: WindowFigures, source: TraceSource) -> float:
    """Prompt and output tokens per second of a cluster that decodes so much offline."""
    inputs, outputs = mean_tokens(source)
    return served.decode_tps * (inputs + outputs) / outputs


def over_draws(draws: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Claims measured once per draw: means with their 95 % intervals, notes of the first draw.

    An order keeps its strict relations if every draw has the same, else all are left open.

    Examples
    --------
    >>> one, two = ([{"claim": "helix-1a", "value": v}, {"claim": "helix-30a", "value": o}]
    ...             for v, o in ((1.0, "a>b"), (3.0, "b>a")))
    >>> [(row["value"], row.get("interval") is not None) for row in over_draws([one, two])]
    [(2.0, True), ('a>=b', False)]
    """
    rows = []
    for first, *others in zip(*draws, strict=True):
        values = [row["value"] for row in (first, *others)]
        if isinstance(first["value"], str):
            value = values[0] if len(set(values)) == 1 else re.sub("([<>])=?", r"\1=", values[0])
            rows.append(first | {"value": value})
        else:
            over = {"interval": interval(values)} if others else {}
            rows.append(first | {"value": float(np.mean(values))} | over)
    return rows
