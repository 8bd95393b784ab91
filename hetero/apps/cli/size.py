"""``hetero size``: the cheapest fleet for a load, over a day's load curve too."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.apps.capacity.curve import DayPlan
    from hetero.apps.capacity.market import Market
    from hetero.apps.capacity.prices import PriceList
    from hetero.apps.capacity.sizing import Sizing
    from hetero.apps.capacity.spot import SpotMix

_EXAMPLE = """
    name: quote of March
    start_s: 240
    machines:
      - {gpu: L4, usd_per_h: 0.8, limit: 40}
      - {gpu: H100-SXM, count: 8, usd_per_h: 24, reserved_usd_per_h: 17}
      - {gpu: L40S, count: 4, usd_per_h: 4.4, spot_usd_per_h: 1.6, losses_per_h: 0.08}
"""
MORE = {"epilog": f"A price list:\n```\n{_EXAMPLE}\n```"}
"""What the command is added with."""

Prices = Annotated[
    list[Path] | None,
    typer.Option(help="Price list (YAML), or several; by default the catalog's dated prices."),
]
Most = Annotated[
    list[str] | None,
    typer.Option("--max", help="At most so many GPUs of a type, as H100-SXM=8; repeat per type."),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option("--gpu", help="Only these GPUs of the prices; repeat per type."),
]
Within = Annotated[
    str | None,
    typer.Option(
        help="Only machines of this cluster (file or name), at its prices, in its number."
    ),
]
Goal = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the requests that must meet the targets.")
]
Precision = Annotated[str, typer.Option(help="Data type of the weights, such as fp16.")]
Seeds = Annotated[
    int, typer.Option(min=1, help="Seeds that a fleet is simulated with; it must pass all.")
]


def size(
    model: options.Model = "Llama-3-8B",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    columns: options.Columns = "",
    arrivals: options.Arrivals = None,
    rate: Annotated[
        float | None, options.above_zero("Load to carry [requests/s]; not with --curve.")
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(help="Load over a day: CSV file with the columns hour (0, 1, ...), rate_rps."),
    ] = None,
    spot: Annotated[
        float | None,
        typer.Option(
            help="Mix in spot machines of --prices: share of the hours that must meet the goal."
        ),
    ] = None,
    autoscale: Annotated[
        float | None,
        options.above_zero(
            "With --curve: also play the day under an autoscaler that keeps machines at this share "
            "of what the busiest hour's carry, such as 0.8."
        ),
    ] = None,
    weights_gbs: Annotated[
        float | None,
        options.above_zero(
            "Bandwidth at which a machine that has started loads the weights [GB/s]; by default in "
            "start_s of --prices; with --autoscale."
        ),
    ] = None,
    on_spot: Annotated[
        bool, typer.Option("--on-spot", help="The autoscaler rents at spot prices, with losses.")
    ] = False,
    slo: options.Targets = "ttft=2s,tpot=100ms",
    goal: Goal = 0.9,
    prices: Prices = None,
    gpu: Gpus = None,
    within: Within = None,
    near: Annotated[
        float,
        typer.Option(
            min=1,
            help="Also search fleets of one GPU type that are proven to cost up to so many times "
            "the cheapest of them, or more.",
        ),
    ] = 1.5,
    most: Most = None,
    precision: Precision = "",
    engine: options.Engine = "vllm",
    seeds: Seeds = 3,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    figure: Annotated[
        Path | None, typer.Option(help="With --curve: draw the day into this file (.png, .svg).")
    ] = None,
    force: options.Force = False,
) -> None:
    """Find the cheapest fleet of whole replicas that carries a load within its targets.

    An integer program proposes fleets, simulation over several seeds decides, and a bound says
    what any fleet of these machines must cost with these step times; draws of their error say how
    often the fleet carries the load. With --curve machines are kept the whole day or rented by the
    hour; with --autoscale an autoscaler is played beside that; with --spot cheaper machines that
    vanish are mixed in.
    """
    from hetero import catalog
    from hetero.apps.capacity import autoscale as scaling
    from hetero.apps.capacity import curve as days
    from hetero.apps.capacity import sizing
    from hetero.apps.capacity.load_curve import LoadCurve
    from hetero.apps.capacity.market import Market
    from hetero.costs.cost import CostSettings
    from hetero.engines import EngineSpec
    from hetero.errors import require
    from hetero.progress import progress
    from hetero.question import Load

    require(
        (rate is not None) + (curve is not None) + (arrivals == "trace") == 1,
        "The load is given by one of --rate, --curve and --arrivals trace.",
        resolve="write --rate 20, or --curve day.csv.",
    )
    require(
        spot is None or curve is None,
        "--spot takes a constant load, and --curve gives a changing one.",
        resolve="give --rate instead of --curve.",
    )
    require(
        autoscale is None or curve is not None,
        "--autoscale follows a changing load, and --rate gives a constant one.",
        resolve="give --curve day.csv.",
    )
    require(
        autoscale is not None or not (weights_gbs or on_spot),
        "--weights-gbs and --on-spot are of an autoscaler.",
        resolve="give --autoscale 0.8 as well.",
    )
    options.new_file(figure, force, *options.PICTURES)
    require(
        figure is None or curve is not None,
        "--figure draws a day.",
        resolve="give --curve as well.",
    )
    load_curve = None if curve is None else LoadCurve.load(curve)
    requested = options.opened(trace, source, seed, columns)
    process, own = options.arriving(arrivals, requested, rate)
    offered = load_curve.peak_rps if load_curve else own or 0.0
    each = tuple(range(seed, seed + seeds))
    load = Load(requested, offered, slo, goal, seeds=each, process=process)
    offers = listed(prices, gpu, most, within)
    llm = catalog.find_llm(model)
    settings = CostSettings(engine=EngineSpec(name=engine, precision=llm.loaded_as(precision)))
    market = Market(offers, llm, load, settings)
    with progress(None, "size", unit="steps") as advance:
        if spot is not None:
            from hetero.apps.capacity.spot import cheapest_mix

            mix = cheapest_mix(market, spot, seed=seed)
        elif load_curve is None:
            found = sizing.cheapest(market, near=near, progress=lambda what: advance(1, what))
        else:
            plan = days.day(market, load_curve, progress=lambda what: advance(1, what))
            if autoscale is not None:
                advance(1, "autoscaler")
                policy = scaling.Policy(autoscale, weights_gbs=weights_gbs, spot=on_spot)
                scaled = scaling.autoscaled(plan, policy)
    if spot is not None:
        options.show(as_json, lambda: _spot(mix), mix)
        return
    if load_curve is None:
        options.show(as_json, lambda: _record(found), found, found.alternatives())
        return
    about = f"{requested.source}, {seeds} seeds from {seed}"
    options.draw(figure, force, "hetero.plots.days:draw", plan, about=about)
    if autoscale is None:
        options.show(as_json, lambda: _day(plan), plan)
    else:
        record = {
            "autoscaler": asdict(policy) | {"start_s": scaled.start_s},
            "over_the_day": [asdict(one) for one in scaled.courses],
        }
        options.show(as_json, lambda: _day(plan) | record, plan, scaled)


def listed(
    prices: list[Path] | None,
    gpus: list[str] | None,
    most: list[str] | None,
    within: str | None = None,
) -> PriceList:
    """The price list of the options that describe one."""
    from hetero import cluster
    from hetero.apps.capacity import prices as lists
    from hetero.errors import require

    require(
        not (prices and within),
        "--within takes the prices of the cluster, and --prices gives others.",
        resolve="leave one of them out.",
    )
    if prices or within:
        own = [lists.load(path) for path in prices or ()]
        found = lists.PriceList.joined(
            own or [lists.PriceList.of_cluster(cluster.find(within or ""))]
        )
        found = found.only(gpus) if gpus else found
    else:
        found = lists.from_catalog(gpus or None)
    limits = options.pairs("--max", most, options.natural, "write a GPU and a number, as L40S=8.")
    return found.limited(limits) if limits else found


def _about(market: Market) -> dict[str, Any]:
    load = market.load
    return {
        "model": market.llm.name,
        "precision": market.settings.engine.precision,
        "trace": load.trace.source,
        "goal": load.goal,
        "slo": {name: value for name, value in asdict(load.slo).items() if value is not None},
        "arrivals": load.process,
        "seeds": list(load.seeds),
        "notes": list(market.notes),
        "precision_of_rate": load.precision,
        "prices": market.prices.name,
    }


def _machines(market: Market, counts: Any) -> list[dict[str, Any]]:
    return [
        {
            "gpu": market.offers[k].gpu.name,
            "gpus_each": market.offers[k].count,
            "number": n,
            "tensor_parallel": list(division),
            "usd_per_h_each": market.offers[k].usd_per_h,
        }
        for (k, division), n in sorted(counts.items())
    ]


def _record(found: Sizing) -> dict[str, Any]:
    low, high = found.best.outcome.attained_interval
    single = found.homogeneous
    return _about(found.market) | {
        "rate_rps": found.market.load.rate_rps,
        "usd_per_h": found.usd_per_h,
        "bound_usd_per_h": found.bound_usd_per_h,
        "gap": found.gap,
        "steady_state_usd_per_h": found.program_usd_per_h,
        "attainment": found.best.outcome.mean,
        "attainment_interval": [low, high],
        "draws": len(found.best.draws),
        "carries_in_draws": found.best.safe,
        "assumed_gpus": list(found.market.assumed(found.best.counts)),
        "machines": _machines(found.market, found.best.counts),
        "cheapest_of_one_gpu_type": single
        and {
            "gpu": single[0],
            "usd_per_h": single[1].usd_per_h,
            "machines": _machines(found.market, single[1].counts),
        },
        "of_one_gpu_type": [
            {"gpu": name, "proven_least_usd_per_h": found.least_usd_per_h.get(name)}
            | (
                {"why": one}
                if isinstance(one, str)
                else {
                    "usd_per_h": one.usd_per_h,
                    "attainment": one.outcome.mean,
                    "carries_in_draws": one.safe,
                    "machines": _machines(found.market, one.counts),
                }
            )
            for name, one in found.alone.items()
        ],
    }


def share_of(draws: tuple[bool, ...]) -> float | None:
    """Share of the draws of step times in which something holds; None without any."""
    return sum(draws) / len(draws) if draws else None


def _spot(mix: SpotMix) -> dict[str, Any]:
    return _about(mix.market) | {
        "rate_rps": mix.market.load.rate_rps,
        "usd_per_h": mix.risk.usd_per_h,
        "on_demand_alone_usd_per_h": mix.on_demand_usd_per_h,
        "probability": mix.probability,
        "hours_that_meet_the_goal": mix.risk.carried,
        "goodput_rps": mix.risk.goodput_rps,
        "attainment_worst_5_percent": mix.risk.worst,
        "attainment_of_played_hours": list(mix.played),
        "carries_in_draws": share_of(mix.draws),
        "on_demand": _machines(mix.market, mix.on_demand),
        "spot": _machines(mix.market, mix.spot),
    }


def _day(plan: DayPlan) -> dict[str, Any]:
    return _about(plan.market) | {
        "usd": plan.usd,
        "bound_usd": plan.bound_usd,
        "steady_state_usd": plan.program_usd,
        "program_gap": plan.program_gap,
        "static_usd": plan.static_usd,
        "tightest_hours": list(plan.tight),
        "carries_in_draws": share_of(plan.draws),
        "reserved": _machines(plan.market, plan.reserved),
        "hours": [
            {
                "hour": hour,
                "rate_rps": rate,
                "on_demand": _machines(plan.market, plan.on_demand[hour]),
                "started": plan.starts[hour],
                "attainment": plan.outcomes[hour].mean,
            }
            for hour, rate in enumerate(plan.curve.rates_rps)
        ],
    }
