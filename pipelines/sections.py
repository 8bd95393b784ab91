"""The parameters of each notebook: types, limits, units and meaning."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Parameters of one notebook; nothing is converted and nothing unknown is let through."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Positive = Annotated[float, Field(gt=0)]
Unsigned = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Swept = Annotated[list[Positive], Field(min_length=1)]
Weights = Annotated[list[Unsigned], Field(min_length=1)]
Window = Annotated[list[Unsigned], Field(min_length=2, max_length=2)]
Counts = Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]


class QuickstartSection(Section):
    """Parameters of 00_quickstart."""

    requests: int = Field(ge=200, description="requests of the log")
    rate_rps: float = Field(gt=0, description="load that the fleet is to carry [requests/s]")
    seed: int = Field(ge=0, description="seed of arrivals and of all that is drawn")


class WorkloadsSection(Section):
    """Parameters of 01_workloads."""

    seed: int = Field(ge=0, description="seed of the traces drawn from twins")
    draws: int = Field(ge=1, description="drawn traces that are compared with the real one")


class LatencyFittingSection(Section):
    """Parameters of 02_latency_fitting."""

    measurements: Literal["derived", "raw"] = Field(
        description="reductions in data/measured, or the published tables (to be fetched); with "
        "real traces the published tables are read wherever they are here"
    )


class TensorParallelSearchSection(Section):
    """Parameters of 03_tensor_parallel_search."""

    seeds: Seeds = Field(description="one sample of requests is drawn with each")
    requests: int = Field(ge=1, description="requests per sample of the estimate")
    duplicated: int = Field(
        ge=1, description="requests per sample of the simulation, each sent eight times"
    )
    overheads_ms: Weights = Field(description="engine time per step for the sensitivity [ms]")


class RequestSchedulingSection(Section):
    """Parameters of 04_request_scheduling."""

    seeds: Seeds = Field(
        description="one sample of requests, arrivals and predictions is drawn with each"
    )
    requests: int = Field(ge=1, description="requests per sample; 4,000 in the paper")
    thetas: Weights = Field(description="weights of the KV usage in eq. 7; 2 in the paper")
    spreads: Weights = Field(description="spreads of the logarithm of predicted over true outputs")
    overheads_ms: Weights = Field(description="engine time per step for the sensitivity [ms]")
    trace_requests: int = Field(
        ge=2, description="requests of the conversation trace for the router of your own"
    )


class HeteroserveSection(Section):
    """Parameters of 05_heteroserve."""

    seeds: list[Annotated[int, Field(ge=0)]] = Field(
        min_length=2, description="one workload each; intervals need at least two"
    )
    requests: int = Field(ge=100, description="requests per run; 10,000 in the paper")
    loads: Swept = Field(description="arrival rates over the nominal one")
    long_shares: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        min_length=1, description="shares of prompts above 2,048 tokens"
    )
    margins: Weights = Field(description="safety margins delta; 0.1 in the paper")
    queue_limits: Swept = Field(description="queue limits Q_max [requests]; 32 in the paper")
    dampings: Swept = Field(description="dampening factors lambda; 2 in the paper")
    bins: list[Annotated[int, Field(ge=2, le=32)]] = Field(
        min_length=1, description="numbers K of length bins; 4 in the paper"
    )


class IslandInnerLoopSection(Section):
    """Parameters of 06_island_inner_loop."""

    width_tokens: int = Field(ge=8, le=8000, description="W, width of a range of lengths [tokens]")
    lengths: int = Field(ge=8, description="input lengths at which 64 GPUs are benchmarked")
    replay_requests: int = Field(
        ge=1000,
        description="requests per played trace; below 200,000 the longest outputs are not over",
    )
    seed: int = Field(ge=0, description="seed of the played arrivals")


class IslandOuterLoopSection(Section):
    """Parameters of 07_island_outer_loop."""

    workloads: list[Literal["code", "conv"]] = Field(
        min_length=1, description="Azure traces of Table 5.1"
    )
    width_tokens: int = Field(ge=8, le=8000, description="W, width of a range of lengths [tokens]")
    tau: float = Field(ge=0, description="largest deviation of a range over its share")
    price: float = Field(ge=0, description="M, price of a deviation")
    seeds: Seeds = Field(description="trials of the divider searches; 10 in the thesis")
    few_seeds: Seeds = Field(
        description="trials for Table 5.1 and of the direct searches; 5 in the thesis"
    )
    saasbo: bool = Field(description="whether SAASBO is among the direct searches")
    fleet_iterations: int = Field(
        ge=2, description="batches of the searches for Table 5.1; 15 in the thesis"
    )
    iterations: int = Field(ge=2, description="batches of the divider searches; 20 in the thesis")
    batches: Counts = Field(description="layouts per batch")
    skews: Weights = Field(description="largest absolute skew of the divider")
    minimums: Counts = Field(description="smallest island [GPUs], each twice the one before")
    direct_iterations: int = Field(
        ge=2, description="batches of the direct searches; 10 in the thesis"
    )
    direct_batches: Counts = Field(description="layouts per batch of the direct searches")
    slots: Counts = Field(description="K, islands per GPU type in the direct search")
    state: str = Field(
        description="folder of the checkout that searches are saved to and resumed from; none if "
        "empty"
    )


class LayerPlacementSection(Section):
    """Parameters of 08_layer_placement."""

    planned: list[str] = Field(
        min_length=1, description="settings that our planner plans, as cluster and model"
    )
    window_s: Window = Field(
        description="warm-up and end of the simulated offline serving [s]; 60 and 660 in the paper"
    )
    seeds: Seeds = Field(
        description="one draw of requests each for the claims; the first also plans and is drawn"
    )


class HelixServingSection(Section):
    """Parameters of 09_helix_serving."""

    settings: list[str] = Field(min_length=1, description="clusters and models that are served")
    offline_s: Window = Field(description="warm-up and end of offline serving [s]")
    online_s: float = Field(ge=3, description="test of online serving [s]; 1800 in the paper")
    shares: list[Share] = Field(
        min_length=1, description="of the largest KV cache per layer, in the chains that are tried"
    )
    shallow: list[Share] = Field(
        description="shares of the largest flow for which shallower placements are sought"
    )
    seeds: Seeds = Field(
        description="one draw of requests each for the claims; the first also plans and is drawn"
    )


class PhaseSplittingSection(Section):
    """Parameters of 10_phase_splitting."""

    seeds: Seeds = Field(description="one sample of requests and Poisson arrivals with each")
    requests: int = Field(ge=50, description="requests per simulated run")
    loads: Swept = Field(description="arrival rates over what the best ratio sustains")
    slo_scale: float = Field(
        gt=0, description="targets over the latencies of a mean request on an A100"
    )
    rate_rps: float = Field(gt=0, description="rate of the plans for 32 GPUs [requests/s]")
    steps: int = Field(ge=0, description="steps of the tabu searches; 100 in the paper")
    stages: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1, description="pipeline stages that a group of a plan may have"
    )


class ThunderserveSection(Section):
    """Parameters of 11_thunderserve."""

    seeds: Seeds = Field(
        description="one search, sample of requests and Poisson arrivals with each"
    )
    requests: int = Field(ge=100, description="requests per simulated run")
    rates_rps: Swept = Field(description="arrival rates, rising [requests/s]")
    plan_scale: float = Field(gt=0, description="SLO scale that plans are made for")
    tabu_steps: int = Field(ge=1, description="steps of a tabu search; 100 in the paper")
    max_stages: int = Field(ge=1, description="pipeline stages of a group; 2 in the paper's plans")
    group_gpus: int = Field(ge=1, description="GPUs of a group of the tabu search; 4 in its plans")
    search_steps: int = Field(
        ge=0, description="steps of the local search that follows the integer program"
    )
    hexgen_generations: int = Field(ge=1, description="generations of HexGen's search")
    loss_rate_rps: float = Field(gt=0, description="arrival rate when GPUs are lost [requests/s]")
    every_loss: list[Literal["coding", "conversation"]] = Field(
        description="workloads for which every group, machine and some links are lost in turn"
    )


class FidelitySection(Section):
    """Parameters of 12_fidelity."""

    helix_offline_s: float = Field(
        gt=0, description="length of Helix's offline runs after a minute of warm-up [s]"
    )
    helix_online_s: float = Field(gt=0, description="length of Helix's online runs [s]")
    requests: int = Field(ge=100, description="requests per simulated plan")
    draws: int = Field(ge=10, description="draws of the step times")
    seed: int = Field(ge=0, description="seed of the draws and of the workload")


class ArenaSection(Section):
    """Parameters of 13_arena."""

    seeds: Seeds = Field(description="arrivals that every plan is played with")
    clusters: list[Annotated[str, Field(pattern=r"^\S.* \S+$")]] = Field(
        min_length=1, description="fleets, each with the model that it serves"
    )
    alike: list[str] = Field(
        description="fleets of which homogeneous ones of equal price take part as well"
    )
    alike_workloads: list[str] = Field(description="traces that these serve")
    workloads: list[str] = Field(min_length=1, description="traces by name")
    loads: Swept = Field(description="offered loads over the best goodput of a case")
    planners: list[str] = Field(description="names of the planners that take part; all if empty")
    span_s: float = Field(gt=0, description="time that arrivals last at least [s]")
    slo_scale: float = Field(
        gt=0, description="targets over the latencies of the mean request alone"
    )
    effort: Literal["quick", "normal", "thorough"] = Field(description="how much planners may try")
    jobs: int = Field(ge=1, description="cases that are played side by side")
    state: str = Field(description="folder of the checkout that cases are kept in; none if empty")


class ExplorerSection(Section):
    """Parameters of 14_explorer."""

    requests: int = Field(ge=100, description="requests that are played at most")
    shares: Swept = Field(description="offered load over the bound, one figure each")
    seed: int = Field(ge=0, description="seed of requests and arrivals")


class LiveSection(Section):
    """Parameters of 15_live."""

    measure: bool = Field(
        description="start the engines and measure anew (8 minutes, two idle cores) instead of "
        "reading what was recorded"
    )
    bar_percent: float = Field(
        gt=0, description="error of a predicted throughput that is accepted [%]"
    )


class CalibrationSection(Section):
    """Parameters of 16_calibration."""

    recomputed: list[Literal["first", "second"]] = Field(
        description="generations of vLLM whose errors are made anew where the published runs are"
    )
    bars_percent: list[Positive] = Field(
        min_length=3,
        max_length=3,
        description="left-out errors of TPOT, E2E and TTFT that are accepted [%]",
    )


class MixedFleetsSection(Section):
    """Parameters of 17_mixed_fleets."""

    routers: list[str] = Field(
        min_length=1, description="routers by name, and 'planned shares' by what GPUs reach alone"
    )
    per_gpu: int = Field(ge=100, description="Offline: requests for each GPU")
    span_s: float = Field(gt=0, description="Server: time that requests come for [s]")
    halvings: int = Field(ge=1, description="Server: halvings of the interval of the rate")
    bar: float = Field(gt=0, description="difference from the measured ratio that is accepted")


SECTIONS: Final[dict[str, type[Section]]] = {
    re.sub("(?<=[a-z])(?=[A-Z])", "_", one.__name__.removesuffix("Section")).lower(): one
    for one in Section.__subclasses__()
}
"""By the name of the class, which is that of the notebook."""
