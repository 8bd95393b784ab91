"""``hetero plan CLUSTER``: the plan card, the group's command where no other is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hetero.apps.cli import options


def card(
    cluster: options.Cluster,
    model: Annotated[
        list[str],
        typer.Option(
            help="Model of the catalog, or a Hugging Face config.json. Several, each with its "
            "--rate in the same order, share the fleet."
        ),
    ],
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    columns: options.Columns = "",
    arrivals: options.Arrivals = None,
    slo: options.Targets = "ttft=500ms,tpot=50ms",
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Load to be carried [requests/s]; without it, as much as the fleet can."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="What may be spent [$/h]; without it the whole cluster.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="Data type or format of weights: fp16, fp8, int8, int4, awq ..., or 'auto'; by "
            "default what the checkpoint states."
        ),
    ] = "",
    goal: Annotated[
        float, typer.Option(help="Share of the requests that has to meet all targets.")
    ] = 0.9,
    choose: Annotated[
        Any,
        options.one_of(
            "hetero.simulator.uncertainty:Rule",
            "Rule among plans: 'nominal', or over draws of the error of step times "
            "'best mean' or 'best worst case'.",
        ),
    ] = "nominal",
    effort: Annotated[
        Any,
        options.one_of(
            "hetero.apps.cards.delivery:EFFORTS",
            "'quick' (a minute or two), 'normal' or 'thorough'.",
        ),
    ] = "quick",
    cheapest: Annotated[
        bool, typer.Option(help="Plan for the cheapest part of the cluster that carries --rate.")
    ] = False,
    engine: options.EngineRelease = "vllm",
    memory: options.Memory = None,
    kv_precision: options.KvPrecision = "fp16",
    kv_tokens: Annotated[
        str,
        typer.Option(
            help="KV cache [tokens] that an engine of the model prints, by its GPUs, as in "
            "H100-SXM=450000,2xL4=180000, instead of what --memory leaves."
        ),
    ] = "",
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step, at most, of every engine.")
    ] = None,
    schedule_ahead: options.ScheduleAhead = None,
    prefix_cache: options.PrefixCache = None,
    prefix_share: options.PrefixShare = None,
    speculate: options.Speculate = "",
    lora: options.Lora = "",
    kv_transfer_bits: Annotated[
        int | None,
        typer.Option(help="Bits per value of KV caches on their way; else as the engine sends."),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            help="Serve prefill and decode apart where that carries more; else together, "
            "as a plan for hetero serve has to."
        ),
    ] = True,
    seed: options.Seed = 0,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare the best plans with and without a change, as in precision=fp8, "
            "kv-precision=fp8, prefix-share=0.5, speculate=length=4,acceptance=0.7; several "
            "joined by + are one change. May be repeated; the comparison replaces the card."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with the card that --json wrote to this file."),
    ] = None,
    power: Annotated[
        bool, typer.Option("--power", help="Add power and energy per token, an estimate.")
    ] = False,
    as_json: options.AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write the card as a page (.html).")] = None,
    output: Annotated[Path | None, options.output("Write the card as JSON.")] = None,
    force: options.Force = False,
) -> None:
    """How a fleet should serve a model, what that delivers and costs, and what binds.

    Every planner is asked; the card says which GPUs form which replicas, how requests are routed,
    the goodput within the targets with its interval and a proven bound, the cost, what limits it,
    what one more machine or another target would change, and where every figure comes from. Where
    no plan meets the request, it says which requests miss which target and what would do.
    """
    from hetero import cluster as clusters
    from hetero.apps.cards.answer import plan
    from hetero.apps.cards.card import PlanCard
    from hetero.apps.cards.difference import difference
    from hetero.apps.cards.infeasible import NoPlanError
    from hetero.apps.cards.power import power as estimate
    from hetero.apps.cards.several import several
    from hetero.apps.cards.whatif import compared
    from hetero.errors import require
    from hetero.progress import progress

    options.new_file(html, force, ".html")
    options.new_file(output, force, ".json")
    other = None if against is None else PlanCard.load(against)
    requested = options.opened(trace, source, seed, columns)
    hint = "write GPUs and a number, as in H100-SXM=450000,2xL4=180000."
    caches = kv_tokens.split(",") if kv_tokens else []
    rates: list[float | None] = [*rate] if rate else [None]
    process, rates[0] = options.arriving(arrivals, requested, rates[0])
    require(
        len(rates) == len(model),
        f"{len(model)} models and {len(rate or ())} rates are given.",
        resolve="give one --model, or as many --rate as --model, in the same order.",
    )
    asked: dict[str, Any] = {
        "trace": requested,
        "slo": slo,
        "budget": budget,
        "precision": precision,
        "goal": goal,
        "choose": choose,
        "effort": effort,
        "seed": seed,
        "engine": engine[0],
        "release": engine[1],
        "memory_fraction": memory,
        "kv_precision": kv_precision,
        "kv_tokens": options.pairs("--kv-tokens", caches, options.natural, hint),
        "max_step_tokens": chunk,
        "schedule_ahead": schedule_ahead,
        "prefix_cache": prefix_cache,
        "prefix_share": prefix_share,
        "speculate": speculate,
        "lora": lora,
        "kv_transfer_bits": kv_transfer_bits,
        "arrivals": process,
        "split": split,
    }
    require(
        not (what_if and (html or against or output))
        and not (len(model) > 1 and (html or against or what_if or cheapest or budget)),
        "Comparisons and several models print no single card, and divide the whole fleet.",
        resolve="leave out --html, --against, --cheapest, --budget; --json keeps it, -o of models.",
    )
    require(
        not (power and (as_json or what_if or len(model) > 1)),
        "--power adds a table to the text of one card.",
        resolve="leave out --json and --what-if, and give one --model.",
    )
    if len(model) > 1:
        loads = [(name, one or 0.0) for name, one in zip(model, rates, strict=True)]
        files = [output.with_stem(f"{output.stem}-{k + 1}") for k in range(len(model)) if output]
        for path in files:
            options.new_file(path, force, ".json")
        with progress(None, "divide", unit="steps") as advance:
            shared = several(cluster, loads, progress=lambda what: advance(1, what), **asked)
        for path, one in zip(files, shared.cards.values(), strict=False):
            one.save(path, force=force)
        print(options.to_json(shared.to_dict()) if as_json else shared)
        return
    asked |= {"model": model[0], "rate": rates[0]}
    if what_if:
        with progress(None, "what if", unit="steps") as advance:
            seen = compared(
                cluster, what_if, progress=lambda what: advance(1, what), cheapest=cheapest, **asked
            )
        print(options.to_json(seen.to_dict()) if as_json else seen)
        return
    try:
        with progress(None, "plan", unit="steps") as advance:
            made = plan(cluster, cheapest=cheapest, progress=lambda what: advance(1, what), **asked)
    except NoPlanError as error:
        if as_json:
            print(options.to_json(error.explanation.to_dict()), end="")
        raise
    for file in (html, output):
        if file is not None:
            made.save(file, force=force)
    gap = None if other is None else difference(made, other)
    if as_json:
        print(made.to_json() if gap is None else options.to_json(gap.to_dict()), end="")
        return
    print(made)
    if power:
        print(f"\n{estimate(made, clusters.find(cluster).gpu_types)}")
    if gap is not None:
        print(f"\n{gap}")
