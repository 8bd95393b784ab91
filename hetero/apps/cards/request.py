r"""What is asked of a plan card: from names, files and texts to a case.

Low-rank adapters of rank r add :math:`r (d_{in} + d_{out})` parameters to every module of
:math:`d_{in} \times d_{out}` that they are on, in 16 bits (Hu et al. 2021); an engine sets that
aside for each adapter that it serves at once. What a step with adapters takes longer is not
modelled: no source for it covers the GPUs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from hetero import catalog
from hetero.apps.ask import PLAN, Ask, asks, choice, natural, pairs
from hetero.apps.cards.delivery import EFFORTS, CardEffort
from hetero.catalog import Llm, serving_engine
from hetero.catalog.precision import PRECISION_BITS
from hetero.cluster import Cluster, Machine
from hetero.cluster.fleets import fleet, linked
from hetero.engines import EngineSpec
from hetero.errors import CatalogError, ParameterError, require
from hetero.latency.speculation import Speculation
from hetero.question import Question, within_context
from hetero.simulator import Slo
from hetero.simulator.uncertainty import Rule
from hetero.streams import stream
from hetero.workload import statistics

PRECISIONS = ("fp16", "fp8", "int8", "int4")
"""Data types of weights that are tried, the widest first.

A GPU takes part in a type that its matrix units compute in, after the data sheet of its catalog
row, or that the engine reads there to compute in 16 bits (``data/engines``). What a type does to
the quality of the replies is not modelled, nor what it takes to quantise a model. Weights are those
of a checkpoint as people publish it (``data/specs/formats.csv``). Efficiencies were calibrated in
16 bits.
"""

_KEPT = 1500  # requests of one's own log, from which on a third is kept from planners
_SCREENED_S = 20.0  # arrivals that planners compare plans by last at least so long


@dataclass(frozen=True, eq=False)
class CardRequest:
    """A case, and how its answer is to be made.

    Attributes
    ----------
    question
        In the first of the precisions, on the GPUs that compute in it.
    cluster
        All GPUs that were offered.
    ask
        As it was asked; without a rate, that of the question is where a search for the largest
        begins.
    precisions
        What may be chosen.
    effort
        How much is simulated.
    notes
        What was left out of the question, and how features are counted.
    """

    question: Question
    cluster: Cluster
    ask: Ask
    precisions: tuple[str, ...]
    effort: CardEffort
    notes: tuple[str, ...] = ()

    @property
    def rate_given(self) -> bool:
        """Whether the rate was asked for."""
        return self.ask.rate is not None

    def at(self, precision: str) -> Question | None:
        """The case in a precision, on the machines whose GPUs compute in it; None without any."""
        machines = able(self.cluster, self.question.engine.name, precision)
        if not machines:
            return None
        engine = replace(self.question.engine, precision=precision)
        return replace(self.question, cluster=self.cluster.part(machines), engine=engine)


def requested(ask: Ask) -> CardRequest:
    """What is asked of :func:`hetero.plan`, read and checked.

    Examples
    --------
    >>> asked = request("xiong-v100-a800", model="Llama-3-8B", rate=2.0)
    >>> asked.question.slo, asked.precisions
    (Slo(ttft_s=0.5, tpot_s=0.05, e2e_s=None), ('fp16',))
    """
    cluster, rate, seed, budget = ask.cluster, ask.rate, ask.seed, ask.budget
    choice("--choose", ask.choose, Rule)
    choice("--effort", ask.effort, EFFORTS)
    engine, release = ask.engine_release
    require(
        isinstance(seed, int) and seed >= 0,
        f"The seed is {seed}.",
        resolve="give a whole number of 0 or more.",
    )
    for what, value in (("rate", rate), ("budget", budget)):
        if value is not None and not 0 < value < math.inf:
            raise ParameterError(
                f"The {what} is {value:g}.", resolve="give a number above 0, or leave it out."
            )
    targets = ask.targets
    require(
        targets != Slo(),
        "A plan card needs at least one target: without any, every rate would do.",
        resolve="give targets such as ttft=500ms,tpot=50ms.",
    )
    offered = linked(cluster) if isinstance(cluster, Cluster) else fleet(cluster)  # type: ignore[arg-type]
    for machine in offered.machines if budget is not None else ():
        require(
            machine.usd_per_h is not None,
            f"A budget needs prices, and machine {machine.name} of {offered.name} has none.",
            resolve="give its usd_per_h in the cluster file, or leave the budget out.",
        )
    llm, trace = ask.llm, ask.opened()
    ask = ask if ask.precision == "auto" else replace(ask, precision=llm.loaded_as(ask.precision))
    precision = ask.precision
    process, rate = ask.arriving(trace)
    if ask.prefix_share is not None:
        trace = trace.with_prefix(ask.prefix_share)
    requests, notes = within_context(trace, llm)
    own = statistics.rate_rps(requests.arrival_s) if len(requests) > 1 else math.inf
    size, log = EFFORTS[ask.effort].requests, None
    if process == "scaled" and len(requests) >= _KEPT:
        log, cut = requests, 2 * len(requests) // 3
        requests = log.take(np.arange(cut))
        kept = f"and what is promised holds in the {len(log) - cut:,} after them as well."
        notes = (*notes, f"Planned with the first {cut:,} requests of the log; {kept}")
    whole = requests
    if len(requests) > size:
        requests = requests.sample(size, stream(seed, "requests of a card"))
    start = rate if rate is not None else (own if np.isfinite(own) else 1.0)
    usable = tuple(
        p for p in (PRECISIONS if precision == "auto" else (precision,)) if able(offered, engine, p)
    )
    if not usable:
        rules, others = (
            serving_engine(engine),
            [p for p in PRECISION_BITS if able(offered, engine, p)],
        )
        where = f" under {rules.title}" if rules.limited else ""
        raise ParameterError(
            f"No GPU of {offered.name} computes in {precision}{where}.",
            resolve=f"use {', '.join(others)}." if others else "plan for another engine.",
        )
    stated = [speculation(ask.speculate, llm, usable[0])] if ask.speculate else []
    stated += [adapters(ask.lora, llm)] if ask.lora else []
    require(
        not stated or serving_engine(engine).limited,
        "Drafts and adapters are features of engines that exist.",
        resolve="plan for vllm, sglang or trtllm.",
    )
    spec = EngineSpec(
        name=engine,
        release=release,
        precision=usable[0],
        kv_precision=ask.kv_precision,
        memory_fraction=ask.memory,
        kv_tokens=_printed(offered, ask.kv_tokens),
        max_step_tokens=ask.chunk,
        schedule_ahead=ask.schedule_ahead,
        prefix_cache=ask.prefix_cache,
        speculation=next((one.speculation for one in stated if one.speculation), None),
        held_gib=sum(one.held_gib for one in stated),
    )
    question = Question(
        offered,
        llm,
        requests,
        start,
        targets,
        ask.goal,
        budget,
        least_s=_SCREENED_S,
        seed=seed,
        drawn_from=whole,
        whole=log,
        engine=spec,
        kv_transfer_bits=ask.kv_transfer_bits,
        process=process,
        split=ask.split,
        spans=False,
    )
    made = CardRequest(
        question,
        offered,
        replace(ask, rate=rate, precision=precision),
        usable,
        EFFORTS[ask.effort],
        (*notes, *(one.note for one in stated)),
    )
    first = made.at(usable[0])
    return replace(made, question=first) if first is not None else made


request = asks(PLAN, Ask)(requested)


def _printed(offered: Cluster, given: Mapping[str, int] | str) -> tuple[tuple[str, int, int], ...]:
    """KV caches by the GPUs of an engine, as (GPU, number, tokens)."""
    hint = "write GPUs and a number, as in H100-SXM=450000,2xL4=180000."
    texts = given.split(",") if isinstance(given, str) and given else given or None
    found = []
    for text, tokens in pairs("--kv-tokens", texts, natural, hint).items():
        number, by, name = text.partition("x")
        count = int(number) if by and number.isdecimal() else 1
        name = name if by and number.isdecimal() else text
        with suppress(CatalogError):
            name = name if name in offered.gpu_types else catalog.gpu(name).name
        require(
            name in offered.gpu_types and count >= 1 and tokens >= 1,
            f"A KV cache of {tokens} tokens on '{text}' is none of {offered.name}.",
            resolve=f"name one or several GPUs, as in 2x{next(iter(offered.gpu_types))}=90000.",
        )
        found.append((name, count, tokens))
    return tuple(found)


def able(cluster: Cluster, engine: str, precision: str) -> tuple[Machine, ...]:
    """Machines on whose GPUs an engine serves weights of a precision."""
    rules = serving_engine(engine)
    return tuple(machine for machine in cluster.machines if rules.serves(machine.gpu, precision))


def counts(gpus: dict[str, int]) -> str:
    """Numbers of GPUs in words.

    Examples
    --------
    >>> counts({"A40": 8, "L4": 2})
    '8 A40, 2 L4'
    """
    return ", ".join(f"{count} {name}" for name, count in gpus.items())


def more(cluster: Cluster, like: Machine, count: int = 1) -> Cluster:
    """The cluster with more machines like one of it, linked as that one is."""
    names = {m.name for m in cluster.machines}
    added: list[Machine] = []
    number = 1
    while len(added) < count:
        name = f"{like.name}-more-{number}"
        if name not in names:
            added.append(replace(like, name=name))
        number += 1
    network = cluster.network
    if network is None:
        return replace(cluster, machines=(*cluster.machines, *added))
    links = dict(network.machines)
    for pair, link in network.machines.items():
        if like.name in pair:
            (other,) = pair - {like.name}
            links |= {frozenset((one.name, other)): link for one in added}
    grown = replace(network, machines=links)
    if grown.within_region is None and (inside := _inside(cluster, like, added)) is not None:
        links |= inside
        grown = replace(network, machines=links)
    return replace(cluster, machines=(*cluster.machines, *added), network=grown)


def _inside(
    cluster: Cluster, like: Machine, added: list[Machine]
) -> dict[frozenset[str], catalog.Link] | None:
    """Links among copies of a machine: as good as the best that it has to any other."""
    others = [m for m in cluster.machines if m.name != like.name]
    known = [cluster.link(like.name, m.name) for m in others]
    if not known:
        return None
    best = max(known, key=lambda link: link.bandwidth_gbs)
    alike = [like, *added]
    return {frozenset((a.name, b.name)): best for k, a in enumerate(alike) for b in alike[k + 1 :]}


T = TypeVar("T", int, float)

_GIB = 2**30
_DRAFTS = "write for instance length=4,acceptance=0.7,draft=0.15."
_ADAPTERS = "write for instance adapters=8,rank=16,on=attention (or all)."


class Feature(NamedTuple):
    """Drafts, what an engine holds for a feature beside its weights [GiB], and a remark."""

    speculation: Speculation | None
    held_gib: float
    note: str


def speculation(text: str, llm: Llm, precision: str = "fp16") -> Feature:
    """Drafts of a text such as ``length=4,acceptance=0.7,draft=0.15``.

    ``draft`` is a model, whose step takes as much of one of the model as it reads weights; a number
    is that share itself; without it one layer of the model and its logits draft, as heads of EAGLE
    and of multi-token prediction do. Weights of a draft are held beside those of the model.

    Examples
    --------
    >>> model = catalog.llm("Llama-3.1-8B")
    >>> found = speculation("length=4,acceptance=0.7", model)
    >>> round(found.speculation.cost, 4), round(found.held_gib, 2)
    (0.0991, 0.41)
    """
    said = _words("speculate", text, ("length", "acceptance", "draft"), _DRAFTS)
    whole, one, what = llm.matmul_params, said.get("draft", ""), "one more layer"
    held = 2.0 * sum(llm.layer_params(llm.layers - 1, 1))
    cost = ((whole - llm.head_params) / llm.layers + llm.head_params) / whole
    if one:
        try:
            held, cost, what = 0.0, float(one), f"{one} of a step"
        except ValueError:
            draft = catalog.find_llm(one)
            held, what = draft.weight_bytes(precision), draft.name
            cost = draft.matmul_params / whole
    length = _number("speculate", said, "length", int, _DRAFTS)
    drafts = Speculation(length, _number("speculate", said, "acceptance", float, _DRAFTS), cost)
    note = (
        f"Speculative decoding is counted by expectation: drafts of {length} tokens by {what}, "
        f"{drafts.tokens:.3g} tokens a step; an answer of 200 tokens deviates by "
        f"{100 * drafts.spread * (drafts.tokens / 200) ** 0.5:.2g} % in its time per token. "
        "Exported commands do not turn it on."
    )
    return Feature(drafts, held / _GIB, note)


def adapters(text: str, llm: Llm) -> Feature:
    """Adapters of a text such as ``adapters=8,rank=16,on=attention``; ``on`` may be ``all``.

    Examples
    --------
    >>> found = adapters("adapters=8,rank=16,on=attention", catalog.llm("Llama-3.1-8B"))
    >>> found.held_gib * 2**30 / 8 == 2 * 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    True
    """
    said = _words("lora", text, ("adapters", "rank", "on"), _ADAPTERS)
    count = _number("lora", said, "adapters", int, _ADAPTERS)
    rank = _number("lora", said, "rank", int, _ADAPTERS)
    where = said.get("on", "attention")
    good = count >= 1 and rank >= 1 and where in ("attention", "all")
    require(good, f"'{text}' are no adapters.", resolve=_ADAPTERS)
    size = count * adapter_bytes(llm, rank, everywhere=where == "all")
    return Feature(
        None,
        size / _GIB,
        f"{count} adapters of rank {rank} hold {size / _GIB:.3g} GiB of each engine; that steps "
        "take longer with them is not counted. Exported commands do not load them.",
    )


def adapter_bytes(llm: Llm, rank: int, *, everywhere: bool = False) -> int:
    """Bytes of one adapter in 16 bits, on projections of attention or on every dense product."""
    require(
        not llm.latent and not (everywhere and llm.experts),
        f"Adapters of {llm.name} are on projections that are not modelled.",
        resolve="ask for a dense model, or for adapters on attention.",
    )
    query, keys = llm.heads * llm.head_dim, llm.kv_heads * llm.head_dim
    sizes = 2 * (llm.hidden + query) + 2 * (llm.hidden + keys)
    if everywhere:
        sizes += (3 if llm.gated_mlp else 2) * (llm.hidden + llm.intermediate)
    return 2 * rank * sizes * llm.layers


def _words(what: str, text: str, known: tuple[str, ...], resolve: str) -> dict[str, str]:
    said = {}
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        require(
            bool(value) and name in known, f"'{part}' says nothing of --{what}.", resolve=resolve
        )
        said[name] = value
    return said


def _number(
    what: str, said: Mapping[str, str], name: str, kind: Callable[[str], T], resolve: str
) -> T:
    try:
        return kind(said[name])
    except (KeyError, ValueError):
        raise ParameterError(f"--{what} needs a number as its {name}.", resolve=resolve) from None
