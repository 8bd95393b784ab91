"""What may be asked, every option once: the words of commands and of their functions in Python.

:class:`Ask` has a field for every option. :func:`words` names those that one function takes, with
what it changes of them, such as another default; :func:`asks` gives the function these arguments,
and the command line (:mod:`hetero.apps.cli.options`) gives its command the same options.
"""

# ruff: noqa: RUF009, `_how` makes a field

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar, cast, get_args

from hetero.errors import ParameterError, require

if TYPE_CHECKING:
    from hetero.apps.cards.card import PlanCard
    from hetero.catalog import EngineName, Llm
    from hetero.cluster import Cluster
    from hetero.simulator import Slo
    from hetero.simulator.sustained import Arrivals
    from hetero.workload import Trace

P = ParamSpec("P")
T = TypeVar("T")

ARRIVALS: Final = ("poisson", "shuffled", "scaled", "trace")
"""Ways that requests come."""
BATCHING: Final = {"chunked": "chunked", "prefill-first": "prefill first"}
"""How engines form steps, as it is typed."""
ROUTERS: Final = ("round-robin", "least-tokens", "power-of-two", "hetero")
"""Routers that are compared where none is named."""
REQUIRED: Final = MISSING
"""Default of what has to be given."""
# Types of what is typed, by the first type of a field.
_NAMED = {"int": int, "float": float, "bool": bool, "Path": Path}
_TYPED: Final[dict[str, Any]] = {**_NAMED, "Slo": "slo", "Sequence[str]": list[str]}
_FIELD = re.compile(r"^:(\w+): (.*(?:\n +.*)*)", re.MULTILINE)


def _how(default: Any, **how: Any) -> Any:
    """A field with a default and how its option is read."""
    return field(default=default, metadata=how)


@dataclass(frozen=True)
class Ask:
    """Everything that may be asked; each function takes the part of its own :func:`words`.

    :cluster: Cluster file (YAML), what nvidia-smi -L or kubectl get nodes -o json printed, a
        SkyPilot task, or the name of a shipped cluster.
    :model: Model of the catalog or of Hugging Face's hub, or a checkpoint's folder.
    :trace: Trace file, or a shipped workload such as azure2023_conv.
    :source: For a shipped workload: its statistical 'twin', or the 'real' trace.
    :columns: Columns of a trace file that names its own: arrival=, input=, output=, session=, unit=
        (s, ms, us, ns, datetime), block= (tokens of a hash id), sort, rebase, skip-bad; as in
        arrival=time,input=asked,output=said.
    :degree: Tensor-parallel degree of every machine: 'best' by the estimate of Xiong et al., one
        number for all, or one per machine, as in a=4,b=1.
    :enable_expert_parallel: Spread whole experts over the GPUs of an engine.
    :data_parallel_size: Ranks of an engine, of --degree GPUs with own attention.
    :router: Router, once or several times; by default round-robin, least-tokens, power-of-two and
        hetero, or that of the plan card; or one of your own, as module:Class.
    :predictor: What routers believe of the lengths of outputs: a 'guess' of the workload's mean and
        spread, or the 'oracle' that knows them.
    :rate: Mean request rate [requests/s]; 'inf' sends all at once.
    :arrivals: How requests come: 'poisson' (in the trace's order), 'shuffled' (in any), 'scaled'
        (the trace's own bursts, stretched to the rate) or 'trace' (its own bursts at its own rate);
        by default scaled for your own trace file with stamps, else poisson.
    :clients: Closed loop: so many clients, each of which sends its next request when its last is
        answered.
    :think: With --clients: time from an answer to the next request [s].
    :requests: Serve only the first requests of the trace.
    :slo: Targets, as in ttft=2s,tpot=150ms,e2e=30s (us, ms, s, min).
    :goal: Share of the requests that has to meet all targets.
    :classes: Shares of the requests in order of priority, as in chat=0.7,batch=0.3: engines and the
        dispatcher serve the first class first, and each has a row of its own.
    :budget: What may be spent [$/h]: rent the part of the cluster that does most; else all of it.
    :precision: Data type or format of weights: fp16, fp8, int8, int4, awq ..., or 'auto'; by
        default what the checkpoint states.
    :choose: Rule among plans: 'nominal', or over draws of the error of step times 'best mean' or
        'best worst case'.
    :effort: 'quick' (a minute or two), 'normal' or 'thorough'.
    :cheapest: Plan for the cheapest part of the cluster that carries --rate.
    :engine: Engine that has to be able to run it, and its release where it matters: vllm,
        vllm@0.12, sglang, trtllm or any.
    :batching: How engines form steps: 'chunked', as those that exist do, or 'prefill-first'.
    :max_batch: Requests that an engine decodes together, at most; by default its own limit for the
        GPU.
    :chunk: Tokens of a step, at most; by default the engine's own limit for the GPU, or 8,192 where
        prompts go first.
    :schedule_ahead: Whether requests join a step when the one before it begins; by default as the
        engine's release does (vLLM from 0.14).
    :prefix_cache: Whether KV blocks are kept for prompts that share them, where the trace names
        blocks (or --prefix-share says so); by default as the engine's release does (vLLM from 0.8).
    :prefix_share: Share of every prompt (0 to 1) that is the beginning of all others too.
    :memory: Share of a GPU's memory that an engine may use (0 to 1); by default its own.
    :kv_precision: Data type of the KV cache.
    :scheduler_recv_interval: Decode steps from one look for new requests to the next (SGLang).
    :sampler: 'flashinfer' where FlashInfer's sampler is installed; by default the release's own.
    :kv_tokens: KV cache [tokens] that an engine of the model prints, by its GPUs, as in
        H100-SXM=450000,2xL4=180000, instead of what --memory leaves.
    :speculate: Speculative decoding: tokens of a draft, the share of them that is accepted, and the
        draft model (or its step's share of the model's), as in length=4,acceptance=0.7,draft=0.15.
    :lora: Adapters that engines hold: number, rank and where (attention or all), as in
        adapters=8,rank=16,on=attention.
    :kv_transfer_bits: Bits per value of KV caches on their way; else as the engine sends.
    :brief: Only the headline and the plan of a card; nothing else is computed.
    :split: Serve prefill and decode apart where that carries more, which hetero serve does not run;
        else together.
    :steps: Step times of a GPU type from a file that 'hetero profile --fit' or 'hetero fit' wrote,
        as L40S=server.json; repeat per type.
    :what_if: Compare the best plans with and without a change, as in precision=fp8,
        kv-precision=fp8, prefix-share=0.5, speculate=length=4,acceptance=0.7; several joined by +
        are one change. May be repeated; the comparison replaces the card.
    :seeds: Seeds that are simulated, from --seed on; -o and --figures hold the first.
    :seed: Seed of all that is random; the same gives the same result.
    :figures: Folder for figures (.png, .svg): queue, KV use and time in steps of every replica over
        time, times to first token.
    :curve: Load over a day: CSV file with the columns hour (0, 1, ...), rate_rps.
    :spot: Mix in spot machines of --prices: share of the time that must meet the goal.
    :autoscale: With --curve: also play the day under an autoscaler that keeps machines at this
        share of what the busiest hour's carry, such as 0.8.
    :weights_gbs: Bandwidth at which a machine that has started loads the weights [GB/s]; by default
        in start_s of --prices; with --autoscale.
    :on_spot: The autoscaler rents at spot prices, with losses.
    :prices: Price list (YAML), or several; by default the catalog's dated prices.
    :gpu: Only these GPUs of the prices; repeat per type.
    :within: Only machines of this cluster (file or name), at its prices, in its number.
    :near: Also search fleets of one GPU type that are proven to cost up to so many times the
        cheapest of them, or more.
    :most: At most so many GPUs of a type, as H100-SXM=8; repeat per type.
    :planner: Whose plan: 'melange', 'phase-splitting', ... or 'best' of all.
    :replan: Also plan again for the machines that are left.
    :spare: Also find the cheapest machines that keep the targets through a loss.
    :to: vllm, kubernetes (or k8s), skypilot, routing or serve.
    :output: Folder for the files; made if need be.
    :weights: What engines load: a Hugging Face name or a path.
    :hosts: Where routing and serve look for engines: 'machines' or 'kubernetes' names.
    :beside: Plan card of another model on the same machines, once or several times: its engines
        have the first GPUs and ports, these the next.
    :force: Replace an existing file.
    :progress: Called with how many more steps are done, or with what is next; no option.
    """

    cluster: Cluster | PlanCard | str | Path | Sequence[str] = _how("", argument=True)
    _: KW_ONLY
    model: Any = "Llama-3-8B"
    trace: Trace | str | Path = "azure2023_conv"
    source: Any = _how("twin", kind="hetero.workload:TraceSource")
    columns: str = ""
    degree: str = "best"
    enable_expert_parallel: bool = False
    data_parallel_size: int = _how(1, min=1)
    router: Any = _how(None, type=list[str])
    predictor: str = _how("guess", kind="hetero.routers.base:PREDICTORS")
    rate: Any = _how(None, type=float)
    arrivals: str | None = _how(None, kind="hetero.apps.ask:ARRIVALS")
    clients: int | None = _how(None, min=1)
    think: float | None = None
    requests: int | None = _how(None, min=1)
    slo: Slo | str = ""
    goal: float = 0.9
    classes: str = ""
    budget: float | None = _how(None, above_zero=True)
    precision: str = ""
    choose: Any = _how("nominal", kind="hetero.simulator.uncertainty:Rule")
    effort: str = _how("quick", kind="hetero.apps.cards.delivery:EFFORTS")
    cheapest: bool = False
    engine: str = "vllm"
    batching: str | None = _how(None, kind="hetero.apps.ask:BATCHING")
    max_batch: int | None = _how(None, min=1)
    chunk: int | None = _how(None, min=1)
    schedule_ahead: bool | None = None
    prefix_cache: bool | None = None
    prefix_share: float | None = None
    memory: float | None = None
    kv_precision: str = _how("fp16", kind="hetero.catalog.precision:PRECISION_BITS")
    scheduler_recv_interval: int = _how(1, min=1)
    sampler: str = _how("", kind="hetero.catalog.engines:Sampler")
    kv_tokens: Mapping[str, int] | str = ""
    speculate: str = ""
    lora: str = ""
    kv_transfer_bits: Any = _how(None, type=int)
    split: bool = False
    brief: bool = _how(False, names=("--brief",))
    steps: Any = _how(None, type=list[str])
    what_if: Sequence[str] | None = None
    seeds: int = _how(1, min=1)
    seed: int = _how(0, min=0)
    figures: Path | str | None = None
    curve: Path | str | None = None
    spot: float | None = None
    autoscale: float | None = _how(None, above_zero=True)
    weights_gbs: float | None = _how(None, above_zero=True)
    on_spot: bool = _how(False, names=("--on-spot",))
    prices: Any = _how(None, type=list[Path])
    gpu: Sequence[str] | None = None
    within: Cluster | str | Path | None = None
    near: float = _how(1.5, min=1)
    most: Sequence[str] | Mapping[str, int] | None = _how(None, names=("--max",))
    planner: str = "melange"
    replan: bool = _how(False, names=("--replan",))
    spare: bool = _how(False, names=("--spare",))
    to: str = _how("", kind="hetero.apps.export:TARGETS", names=("--to",))
    output: Path | str = _how("", names=("-o", "--output"))
    weights: str = ""
    hosts: Any = _how("machines", kind="hetero.apps.export.files:Hosts")
    beside: Sequence[str] | None = None
    force: bool = _how(False, names=("--force",))
    progress: Any = None

    @property
    def llm(self) -> Llm:
        """The model."""
        from hetero import catalog

        return self.model if isinstance(self.model, catalog.Llm) else catalog.find_llm(self.model)

    @property
    def fleet(self) -> Cluster:
        """The machines."""
        from hetero import cluster

        given: Any = self.cluster
        return given if isinstance(given, cluster.Cluster) else cluster.find(given)

    @property
    def targets(self) -> Slo:
        """The targets."""
        from hetero.simulator import Slo

        return Slo.read(self.slo) if isinstance(self.slo, str) else self.slo

    @property
    def engine_release(self) -> tuple[EngineName, str]:
        """Engine and release of a text such as ``vllm@0.12``; an empty release for the newest.

        Examples
        --------
        >>> Ask(engine="vllm@0.12").engine_release, Ask(engine="any").engine_release
        (('vllm', '0.12'), ('any', ''))
        """
        from hetero.catalog import engines

        name, at, release = self.engine.partition("@")
        choice("--engine", name, engines.EngineName)
        if at:
            engines.release_numbers(release)
        return name, release  # type: ignore[return-value]

    def opened(self) -> Trace:
        """The requests."""
        from hetero import workload

        if isinstance(self.trace, workload.Trace):
            return self.trace
        return workload.open_trace(self.trace, self.source, self.seed, columns=self.columns)

    def arriving(self, trace: Trace) -> tuple[Arrivals, float | None]:
        """How requests come, and at which rate [requests/s]."""
        from hetero.workload import statistics

        if self.arrivals is not None:
            choice("--arrivals", self.arrivals, ARRIVALS)
        kind = self.arrivals or ("scaled" if trace.own_bursts else "poisson")
        if kind in ("poisson", "shuffled"):
            return cast("Arrivals", kind), self.rate
        own = statistics.rate_rps(trace.arrival_s)
        require(
            math.isfinite(own),
            f"--arrivals {kind}: all requests of {trace.name} arrive at once.",
            resolve="use --arrivals poisson, or name the column of the arrivals with --columns.",
        )
        require(
            kind == "scaled" or self.rate is None,
            "--arrivals trace is at the trace's own rate.",
            resolve="leave out --rate, or use --arrivals scaled.",
        )
        return "scaled", own if kind == "trace" else self.rate

    def came(self, trace: Trace, seed: int) -> tuple[Trace, str]:
        """The first requests as they came, at a rate or of clients, and that in words."""
        from hetero.simulator import sustained

        if self.requests is not None:
            trace = trace.head(min(self.requests, len(trace)))
        rate, clients = self.rate, self.clients
        if clients is not None:
            require(
                rate is None and self.arrivals is None,
                "--clients send requests when others are answered, at no rate of their own.",
                resolve="leave out --rate and --arrivals, or --clients.",
            )
            each = f"{clients} clients that each wait" if clients > 1 else "one client that waits"
            after = f" and {self.think:g} s more" if self.think else ""
            return trace.closed_loop(clients, self.think or 0.0), f"{each} for an answer{after}"
        require(
            self.think is None,
            "--think is the time that clients take between an answer and their next request.",
            resolve="give --clients, or leave it out.",
        )
        if rate is None:
            require(
                self.arrivals in (None, "trace"),
                f"--arrivals {self.arrivals} is at a rate.",
                resolve="give --rate, or leave out --arrivals for the trace's own.",
            )
            return trace, "arrivals of its own"
        require(
            rate > 0,
            f"A rate of {rate:g} requests/s serves nothing.",
            resolve="give a number above 0, or inf to send all requests at once.",
        )
        if math.isinf(rate):
            return trace.all_at_once(), "all at once"
        process, _ = self.arriving(trace)
        came = sustained.came(trace, process, f", {rate:g} requests/s")
        if process == "scaled":
            return trace.rescale(rate_rps=rate), came
        return sustained.arrivals(trace, len(trace), rate, seed, process), came


# How texts are read ----------------------------------------------------------------------------


def choice(option: str, value: str, allowed: Any) -> Any:
    """Return ``value`` if it is one of a ``Literal``'s values, or of a collection of names."""
    values = [str(v) for v in get_args(allowed) or allowed]
    near = difflib.get_close_matches(value, values, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    require(
        value in values,
        f"{option} does not know '{value}'.",
        resolve=f"{hint}use one of {', '.join(values)}.",
    )
    return value


def positive(option: str, value: float) -> float:
    """Return ``value`` if it is a number above 0, and finite.

    Examples
    --------
    >>> positive("--rate", 4.0)
    4.0
    """
    require(
        0 < value < math.inf, f"{option} is {value:g}.", resolve="give a number above 0, such as 4."
    )
    return value


def word(value: str) -> str:
    """A text that is not empty."""
    if not value:
        raise ValueError(value)
    return value


def natural(text: str) -> int:
    """A whole number of 0 or more, without a sign."""
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def pairs(
    option: str,
    given: Mapping[str, T] | Iterable[str] | None,
    value: Callable[[str], T],
    resolve: str,
) -> dict[str, T]:
    """Names and values of texts such as ``H200=64``, or of a mapping.

    Examples
    --------
    >>> pairs("--max", ["L4=8", "A40 = 2"], natural, "write a GPU and a number.")
    {'L4': 8, 'A40': 2}
    """
    if isinstance(given, Mapping):
        return dict(given)
    found = {}
    for text in given or ():
        name, _, own = (part.strip() for part in text.partition("="))
        try:
            found[name] = value(own if name else "")
        except ValueError:
            raise ParameterError(
                f"{option} cannot read '{text.strip()}'.", resolve=resolve
            ) from None
    return found


# What each function takes ----------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """An option as one function takes it."""

    name: str
    default: Any
    help: str
    how: Mapping[str, Any]


Words: TypeAlias = tuple[Word, ...]


def words(names: str, ask: type[Ask] = Ask, **own: Any) -> Words:
    """Fields of a function by name; ``own`` is another default, or how else one differs."""
    texts = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in ask.__mro__[:-1])
    help_ = {name: " ".join(text.split()) for name, text in _FIELD.findall(texts)}
    known = {one.name: one for one in fields(ask)}
    found = []
    for name in names.split():
        one, mine = known[name], own.get(name, {})
        mine = mine if isinstance(mine, dict) else {"default": mine}
        type_ = _TYPED.get(str(one.type).split(" | ")[0], str)
        how = {"default": one.default, "help": help_[name], "type": type_, **one.metadata, **mine}
        found.append(Word(name, how.pop("default"), how.pop("help"), how))
    return tuple(found)


def asks(taken: Words, ask: Callable[P, Ask]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function of an :class:`Ask` the words that it takes as its arguments."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        progress = Parameter("progress", Parameter.KEYWORD_ONLY, default=None)
        signature = inspect.Signature([*map(parameter, taken), progress])

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            made: Callable[..., Ask] = ask
            return function(made(**given.arguments))

        call.__signature__ = signature  # type: ignore[attr-defined]
        head, mark, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\nRaises\n---")
        if not mark:
            head, mark, rest = head.partition("\n\nExamples\n---")
        each = (f"{one.name}\n    {_in_python(one.help)}" for one in taken)
        call.__doc__ = "\n".join([head, "", "Parameters", "-" * 10, *each]) + mark + rest
        return call

    return decorate


def parameter(one: Word, annotation: Any = Parameter.empty) -> Parameter:
    """A word as an argument: the cluster comes first and needs no name."""
    kind = Parameter.POSITIONAL_OR_KEYWORD if "argument" in one.how else Parameter.KEYWORD_ONLY
    default = Parameter.empty if one.default is REQUIRED else one.default
    return Parameter(one.name, kind, default=default, annotation=annotation)


def _in_python(help_: str) -> str:
    """Help that names arguments in place of options."""
    return re.sub(r"--([a-z-]+)", lambda found: f"``{found[1].replace('-', '_')}``", help_)


_LOAD = "trace source columns arrivals"
_CACHE = "schedule_ahead prefix_cache prefix_share"
_WEIGHTS = {
    "help": "Data type or format of the weights, such as fp8 or awq; by default what the "
    "checkpoint states."
}
_NEEDED = {"default": REQUIRED}
_TARGETS, _LOOSER = "ttft=500ms,tpot=50ms", "ttft=2s,tpot=100ms"

PLAN = words(
    f"cluster model {_LOAD} slo rate budget precision goal choose effort cheapest engine memory "
    f"kv_precision kv_tokens chunk {_CACHE} speculate lora kv_transfer_bits split brief seed",
    cluster=_NEEDED,
    model=_NEEDED,
    slo=_TARGETS,
    rate={"help": "Load to be carried [requests/s]; without it, as much as the fleet can."},
)
WHAT_IF = (*PLAN, *words("what_if"))
SEVERAL = words(
    " ".join(one.name for one in PLAN),
    cluster=_NEEDED,
    slo=_TARGETS,
    model={
        "default": REQUIRED,
        "help": "Model of the catalog, or a Hugging Face config.json. Several, each with its "
        "--rate in the same order, share the fleet.",
        "type": list[str],
    },
    rate={
        "help": "Load to be carried [requests/s]; without it, as much as the fleet can.",
        "type": list[float],
    },
)
SIMULATE = words(
    "cluster model trace source columns degree enable_expert_parallel data_parallel_size router "
    f"predictor rate arrivals clients think requests slo classes batching max_batch chunk {_CACHE} "
    "memory scheduler_recv_interval sampler kv_tokens precision kv_precision engine steps seed "
    "seeds figures",
    cluster={
        "default": REQUIRED,
        "help": "Cluster file (YAML), what nvidia-smi -L or kubectl get nodes -o json printed, the "
        "name of a shipped cluster, or a plan card (.json).",
    },
    kv_tokens={
        "help": "KV cache of a replica [tokens], as its engine prints it, instead of what "
        "--memory leaves: one number for all, or one per machine, as in a=469072,b=93312."
    },
    precision=_WEIGHTS,
    seeds={
        "help": "Seeds from --seed on; of several, each draws the requests anew in blocks, and "
        "routers are told apart by paired 95 % intervals."
    },
)
SIZE = words(
    f"model {_LOAD} rate curve spot autoscale weights_gbs on_spot slo goal prices gpu within near "
    "most precision engine seeds seed",
    rate={"help": "Load to carry [requests/s]; not with --curve.", "above_zero": True},
    slo=_LOOSER,
    precision=_WEIGHTS,
    seeds={"default": 3, "help": "Seeds that a fleet is simulated with; it must pass all."},
)
RESILIENCE = words(
    f"cluster rate model {_LOAD} slo goal planner replan spare prices gpu most precision seeds "
    "engine seed",
    cluster=_NEEDED,
    rate={"help": "Load to carry [requests/s].", "above_zero": True},
    slo=_LOOSER,
    precision=_WEIGHTS,
    seeds=3,
    planner="best",
)
EXPORT = words(
    "cluster to output model weights trace source slo rate budget precision memory router hosts "
    "beside engine seed force",
    cluster={
        "default": REQUIRED,
        "help": "Plan card (JSON), or a cluster to plan for: file or shipped name.",
    },
    to=_NEEDED,
    output=_NEEDED,
    model={
        "default": None,
        "help": "Model of the catalog, or a Hugging Face config.json; by default the card's.",
    },
    slo=_TARGETS,
    rate={"help": "Load to plan for [requests/s]; else all it can carry."},
    precision={"help": "Data type of weights, or 'auto'; a card has its own."},
    memory={"help": "Share of a GPU's memory that an engine may use; by default the card's."},
    router={
        "type": str,
        "help": "Router of the dispatcher instead of the plan's, such as hetero.",
    },
)


# Of methods ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IslandAsk(Ask):
    """What islands are cut by, besides.

    :width: Width of a range of lengths [tokens].
    :reading: What throughput counts: printed, thesis, whole or fitting.
    :minimum: Smallest island [GPUs].
    :largest: Largest island [GPUs].
    :pairs: Even sizes only: GPUs come in pairs.
    :powers: Sizes that are powers of two only.
    :method: 'exact', or a search: bo and saasbo by Ax, mutation, sobol, random.
    :batch: Layouts per batch of a search.
    :iterations: Batches of a search.
    :state: File that a search is saved to and resumed from.
    :price: Price of a GPU [$/h], as H200=4; repeat per type.
    :load: Buy the cheapest GPUs for this load [requests/s].
    """

    width: int = _how(400, min=1)
    reading: str = "fitting"
    minimum: int = _how(2, min=1)
    largest: int = _how(128, min=1)
    pairs: bool = False
    powers: bool = False
    method: Any = _how("exact", metavar="<str>")
    batch: int = _how(16, min=1)
    iterations: int = _how(15, min=1)
    state: Path | None = None
    price: Sequence[str] | Mapping[str, float] | None = None
    load: float | None = _how(None, above_zero=True)


@dataclass(frozen=True)
class PhaseAsk(Ask):
    """What groups of prefill and decode are planned by, and services mended by, besides.

    :slo_scale: Without --slo: targets as multiples of a mean request on an A100.
    :search: 'patterns' (ours), 'tabu' (the paper's) or 'exact' (small fleets).
    :bits: Bits per value of KV transfers: 16, 8 or 4.
    :overlap: Send KV caches layer by layer while prefill goes on.
    :max_stages: Pipeline stages of a group.
    :jobs: Processes that evaluate designs.
    :lose: Machine that fails; may be given several times.
    :lose_gpu: Machine of which one GPU fails, with a group that uses it.
    :slow: Link that slows, as in a40,3090ti-1=0.1 (share of bandwidth).
    :shift: Trace or workload that takes over instead of a loss.
    :policies: Policies to compare: none, light, full, separated by commas.
    :at: Time of the change [s].
    :search_s: Time until the new plan is there [s]; by default as measured here.
    :disk_gbs: Disk bandwidth of a machine [GB/s].
    :drain: Groups finish their requests before they change their phase.
    """

    slo_scale: float = _how(8.0, above_zero=True)
    search: Any = _how("patterns", kind="hetero.planners.thunderserve.phases:Search")
    bits: Any = _how(4, type=int)
    overlap: bool = False
    max_stages: int = _how(4, min=1)
    jobs: int = _how(1, min=1)
    lose: Sequence[str] | None = None
    lose_gpu: str = ""
    slow: str = ""
    shift: str = ""
    policies: str = "none,light,full"
    at: float = _how(60.0, min=0)
    search_s: float | None = _how(None, min=0)
    disk_gbs: float = _how(1.2, above_zero=True)
    drain: bool = False


_STEPS = {"help": "Steps of the search; by default its own number.", "type": int, "min": 0}
ISLANDS = words(
    "cluster model trace source columns width reading minimum largest pairs powers method batch "
    "iterations state price budget load seed",
    IslandAsk,
    cluster={
        "default": REQUIRED,
        "help": "GPUs, as H200=64 H20=128, or a cluster (file or shipped name); with --load "
        "the most on offer.",
        "type": list[str],
    },
    model={
        "default": "DeepSeek-V3",
        "help": "Mixture-of-experts model of the catalog, or a Hugging Face config.json.",
    },
    budget={"help": "Most that all islands may cost [$/h]."},
)
LAYERS = words("cluster model seed", cluster=_NEEDED, model="Llama-2-70B")
PHASES = words(
    "cluster model trace source columns rate slo slo_scale search steps bits overlap max_stages "
    "budget requests choose seed jobs",
    PhaseAsk,
    cluster=_NEEDED,
    model="LLaMA-1-30B",
    rate={"default": 4.0, "help": "Request rate to plan for [requests/s].", "above_zero": True},
    steps=_STEPS,
    requests={"default": 0, "help": "Requests of a simulation of the plan; 0 for none.", "min": 0},
    choose={
        "help": "Rule among the plans of three searches, seeds SEED to SEED+2: 'nominal' (one "
        "search), or over draws of the error of step times 'best mean', 'best worst case'."
    },
)
RESCHEDULE = words(
    "cluster model trace source columns rate slo slo_scale budget lose lose_gpu slow shift "
    "policies at search_s disk_gbs drain requests steps max_stages seed",
    PhaseAsk,
    cluster=_NEEDED,
    model="LLaMA-1-30B",
    rate={"default": 4.0, "help": "Request rate [requests/s].", "above_zero": True},
    requests={"default": 1000, "help": "Requests of the episode.", "min": 10},
    steps=_STEPS,
)
