"""``hetero resilience``: what remains of a plan without any one machine, and spares."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options
from hetero.apps.cli.size import Goal, Gpus, Most, Precision, Prices, listed, share_of

if TYPE_CHECKING:
    from hetero.apps.capacity.resilience import Loss
    from hetero.planners.base import Planner
    from hetero.plans import Plan
    from hetero.question import Question


def resilience(
    cluster: options.Cluster,
    rate: Annotated[float | None, options.above_zero("Load to carry [requests/s].")] = None,
    model: options.Model = "Llama-3-8B",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    columns: options.Columns = "",
    arrivals: options.Arrivals = None,
    slo: options.Targets = "ttft=2s,tpot=100ms",
    goal: Goal = 0.9,
    planner: Annotated[
        str,
        typer.Option(help="Whose plan: 'melange', 'phase-splitting', ... or 'best' of all."),
    ] = "melange",
    replan: Annotated[
        bool, typer.Option("--replan", help="Also plan again for the machines that are left.")
    ] = False,
    spare: Annotated[
        bool,
        typer.Option(
            "--spare", help="Also find the cheapest machines that keep the targets through a loss."
        ),
    ] = False,
    prices: Prices = None,
    gpu: Gpus = None,
    most: Most = None,
    precision: Precision = "",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds that are simulated.")] = 3,
    engine: options.Engine = "vllm",
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Say what is left of a plan if any one machine is lost, and what spare would make up for it.

    Every machine is taken away in turn, before a run and in the middle of one, by simulation.
    """
    from hetero import catalog
    from hetero import cluster as clusters
    from hetero.apps.capacity import resilience as losses
    from hetero.apps.capacity.spare import spare as find_spare
    from hetero.apps.cards.request import able
    from hetero.engines import EngineSpec
    from hetero.errors import require
    from hetero.progress import progress
    from hetero.question import Question, within_context

    llm, where = catalog.find_llm(model), clusters.find(cluster)
    requested, notes = within_context(options.opened(trace, source, seed, columns), llm)
    process, offered = options.arriving(arrivals, requested, rate)
    require(
        offered is not None,
        "The load is given by --rate or --arrivals trace.",
        resolve="write --rate 20.",
    )
    precision = llm.loaded_as(precision)
    machines = able(where, engine, precision)
    require(
        bool(machines),
        f"No GPU of {where.name} computes in {precision} under the engine {engine}.",
        resolve="choose another precision, or --engine any.",
    )
    question = Question(
        where.part(machines),
        llm,
        requested,
        offered or 0.0,
        slo,
        goal,
        seed=seed,
        engine=EngineSpec(name=engine, precision=precision),
        process=process,
    )
    each = tuple(range(seed, seed + seeds))
    with progress(None, "resilience", unit="steps") as advance:
        advance(1, "plan")
        plan, maker = _plan(planner, question)
        alone = replan or plan.deployment is None
        found = losses.resilience(
            plan,
            question,
            planner=maker if alone else None,
            seeds=each,
            progress=lambda what: advance(1, what),
        )
    extra = find_spare(plan, question, listed(prices, gpu, most), seeds=each) if spare else None
    record: dict[str, Any] = {
        "cluster": question.cluster.name,
        "model": question.llm.name,
        "planner": plan.planner,
        "rate_rps": question.rate_rps,
        "goal": question.goal,
        "seeds": list(each),
        "arrivals": process,
        "notes": list(notes),
        "holds": found.holds,
        "draws": len(found.draws),
        "holds_in_draws": share_of(found.draws),
        "whole": _loss(found.whole),
        "losses": [_loss(one) for one in found.losses],
    }
    if extra is not None:
        record["spare"] = {
            "machines": extra.machines,
            "usd_per_h": extra.usd_per_h,
            "losses": [
                {"machine": name or None, "attainment": one.mean} for name, one in extra.losses
            ],
        }
    shown = filter(None, [extra, "\n".join(notes)])
    options.show(as_json, lambda: record, plan, found, *shown)


def _plan(name: str, question: Question) -> tuple[Plan, Planner]:
    """The plan of a planner, and the planner that plans again: of the best, the one that won."""
    from hetero.search.planners import planner, planners
    from hetero.search.portfolio import portfolio

    known = {_slug(one.name): one.name for one in planners()}
    chosen = options.choice("--planner", _slug(name), ["best", *known])
    if chosen != "best":
        maker = planner(known[chosen])
        return maker.plan(question), maker
    found = portfolio(question)
    return found.plan, planner(found.single.planner)


def _slug(name: str) -> str:
    """A planner's name as it is typed: no accents, no spaces."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return plain.lower().replace(",", "").replace(" ", "-")


def _loss(one: Loss) -> dict[str, Any]:
    return {
        "machines": list(one.machines),
        "gpus": one.gpus,
        "attainment": one.after and one.after.mean,
        "sustained_rps": one.sustained_rps,
        "carries_in_draws": share_of(one.draws),
        "attainment_minute_after": one.shock,
        "interrupted_requests": one.interrupted,
        "attainment_planned_again": one.planned_again and one.planned_again.mean,
    }
