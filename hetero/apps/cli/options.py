"""Arguments and options that several commands share, and their checks."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import typer

from hetero.errors import ParameterError, require
from hetero.files import check_new, writing

if TYPE_CHECKING:
    from hetero.apps.profiling import Endpoint
    from hetero.catalog import EngineName
    from hetero.simulator import Metrics
    from hetero.workload import Trace as Requests

T = TypeVar("T")


def one_of(kind: str, help_: str, *names: str) -> Any:
    """Option with one of a ``Literal``'s values, or of a collection's; ``kind`` is its path."""

    def known(param: typer.CallbackParam, value: str | None) -> Any:
        return value and choice(param.opts[0], value, resolve_name(kind))

    return typer.Option(*names, help=help_, metavar="<str>", callback=known)


def above_zero(help_: str) -> Any:
    """Option with a finite number above 0, or none."""

    def checked(param: typer.CallbackParam, value: float | None) -> float | None:
        return value if value is None else positive(param.opts[0], value)

    return typer.Option(help=help_, callback=checked)


Cluster = Annotated[
    str, typer.Argument(help="Cluster file (YAML) or the name of a shipped cluster.")
]
Model = Annotated[
    str,
    typer.Option(help="Model of the catalog or of Hugging Face's hub, or a checkpoint's folder."),
]
MoeModel = Annotated[
    str,
    typer.Option(help="Mixture-of-experts model of the catalog, or a Hugging Face config.json."),
]
Trace = Annotated[
    str, typer.Option(help="Trace file, or a shipped workload such as azure2023_conv.")
]
Source = Annotated[
    Any,
    one_of(
        "hetero.workload:TraceSource",
        "For a shipped workload: its statistical 'twin', or the 'real' trace.",
    ),
]
Columns = Annotated[
    str,
    typer.Option(
        help="Columns of a trace file that names its own: arrival=, input=, output=, session=, "
        "unit= (s, ms, us, ns, datetime), sort, rebase; as in arrival=time,input=asked,output=said."
    ),
]
Arrivals = Annotated[
    str | None,
    one_of(
        "hetero.apps.cli.options:ARRIVALS",
        "How requests come: 'poisson', 'scaled' (the trace's own bursts, stretched to the rate) or "
        "'trace' (its own bursts at its own rate); by default scaled for your own trace file with "
        "stamps, else poisson.",
    ),
]
Targets = Annotated[
    Any,
    typer.Option(
        help="Targets, as in ttft=2s,tpot=150ms,e2e=30s (us, ms, s, min).",
        metavar="<str>",
        parser=lambda text: resolve_name("hetero.simulator:Slo").read(text, "--slo"),
    ),
]
SloScale = Annotated[
    float, above_zero("Without --slo: targets as multiples of a mean request on an A100.")
]
Budget = Annotated[
    float | None,
    above_zero("Budget [$/h]: rent the part of the cluster that attains most."),
]
Rate = Annotated[
    float | None, typer.Option(help="Mean request rate [requests/s]; 'inf' sends all at once.")
]
Clients = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Closed loop: so many clients, each of which sends its next request when its last is "
        "answered.",
    ),
]
Think = Annotated[
    float | None,
    typer.Option(help="With --clients: time from an answer to the next request [s]."),
]
Url = Annotated[str, typer.Argument(help="Address of the server, as http://localhost:8000.")]
ServedModel = Annotated[str, typer.Option(help="Name under which the server knows the model.")]
Engine = Annotated[
    Any,
    one_of(
        "hetero.catalog:EngineName",
        "Engine that has to be able to run the plan: vllm, sglang, trtllm, or any.",
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        "--memory",
        help="Share of a GPU's memory that an engine may use (0 to 1); by default its own.",
    ),
]
ScheduleAhead = Annotated[
    bool | None,
    typer.Option(
        help="Whether requests join a step when the one before it begins; by default as the "
        "engine's release does (vLLM from 0.14).",
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        help="Whether KV blocks are kept for prompts that share them, where the trace names blocks "
        "(or --prefix-share says so); by default as the engine's release does (vLLM from 0.8).",
    ),
]
PrefixShare = Annotated[
    float | None,
    typer.Option(help="Share of every prompt (0 to 1) that is the beginning of all others too."),
]
Speculate = Annotated[
    str,
    typer.Option(
        help="Speculative decoding: tokens of a draft, the share of them that is accepted, and the "
        "draft model (or its step's share of the model's), as in "
        "length=4,acceptance=0.7,draft=0.15."
    ),
]
Lora = Annotated[
    str,
    typer.Option(
        help="Adapters that engines hold: number, rank and where (attention or all), as in "
        "adapters=8,rank=16,on=attention."
    ),
]
EngineRelease = Annotated[
    Any,
    typer.Option(
        help="Engine, and its release where it matters: vllm, vllm@0.12, sglang, trtllm or any.",
        metavar="<str>",
        parser=lambda text: engine_release(text),
    ),
]
KvPrecision = Annotated[
    Any, one_of("hetero.catalog.precision:PRECISION_BITS", "Data type of the KV cache.")
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of all that is random; the same gives the same result.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Figure = Annotated[Path | None, typer.Option(help="Draw the plan into this file (.png, .svg).")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Record = Annotated[
    bool, typer.Option("--record", help="Write the times to data/measured/timings.csv.")
]

ARRIVALS = ("poisson", "scaled", "trace")
"""Ways that requests come."""

PICTURES = (".png", ".svg")
"""Endings of figures."""

TABLES = (".csv", ".csv.gz", ".parquet")
"""Endings of tables with a row per request."""


def output(help_: str) -> Any:
    """Option ``-o``, ``--output`` of a command, which says what it writes."""
    return typer.Option("-o", "--output", help=help_)


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


def engine_release(text: str) -> tuple[EngineName, str]:
    """Engine and release of a text such as ``vllm@0.12``; an empty release for the newest.

    Examples
    --------
    >>> engine_release("vllm@0.12"), engine_release("any")
    (('vllm', '0.12'), ('any', ''))
    """
    from hetero.catalog import engines

    name, at, release = text.partition("@")
    choice("--engine", name, engines.EngineName)
    if at:
        engines.release_numbers(release)
    return name, release  # type: ignore[return-value]


def new_file(path: Path | None, force: bool, *endings: str) -> None:
    """Refuse an output file that could not be written, or does not end as its kind should.

    Examples
    --------
    >>> new_file(Path("plan.png"), False, *PICTURES)
    """
    if path is None:
        return
    known = " or ".join(filter(None, (", ".join(endings[:-1]), *endings[-1:])))
    require(
        path.name.endswith(endings or ""),
        f"The ending of {path.name} is of no known kind.",
        resolve=f"end its name with {known}.",
    )
    check_new(path, force=force)


def positive(option: str, value: float) -> float:
    """Return ``value`` if it is a number above 0, and finite.

    Examples
    --------
    >>> positive("--rate", 4.0)
    4.0
    """
    good = 0 < value < math.inf
    require(good, f"{option} is {value:g}.", resolve="give a number above 0, such as 4.")
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
    option: str, texts: Iterable[str] | None, value: Callable[[str], T], resolve: str
) -> dict[str, T]:
    """Names and values of texts such as ``H200=64``.

    Examples
    --------
    >>> pairs("--max", ["L4=8", "A40 = 2"], natural, "write a GPU and a number.")
    {'L4': 8, 'A40': 2}
    """
    found = {}
    for text in texts or ():
        name, _, given = (part.strip() for part in text.partition("="))
        try:
            found[name] = value(given if name else "")
        except ValueError:
            raise ParameterError(
                f"{option} cannot read '{text.strip()}'.", resolve=resolve
            ) from None
    return found


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers of an option that takes several, by commas.

    Examples
    --------
    >>> whole_numbers("--batch", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(
            f"{option} cannot read '{text}'.", resolve="write whole numbers, such as 1,2,4."
        ) from None


def show(as_json: bool, record: Callable[[], object], *shown: object) -> None:
    """Print a record as JSON, or in its place what is shown, an empty line between."""
    print(to_json(record()) if as_json else "\n\n".join(map(str, shown)) + "\n", end="")


def draw(
    path: Path | None, force: bool, picture: str, *items: object, about: str = "", **more: object
) -> None:
    """Draw a picture, named as ``module:function``, into a file, if one is asked for."""
    if path is None:
        return
    from hetero.plots import figures

    figures.use_style()
    drawn = resolve_name(picture)(*items, **more)
    if about:
        figures.stamp(drawn, about)
    with writing(path, force=force) as part:
        drawn.savefig(part, format=path.suffix[1:])
    figures.close(drawn)


def to_json(value: object) -> str:
    """JSON text with a line end, as every ``--json`` option prints it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def opened(trace: str, source: str, seed: int, columns: str = "") -> Requests:
    """The trace of a command's options."""
    from hetero import workload

    return workload.open_trace(trace, source, seed, columns=columns)  # type: ignore[arg-type]


def arriving(
    chosen: str | None, trace: Requests, rate: float | None
) -> tuple[Literal["poisson", "scaled"], float | None]:
    """How requests come and at which rate, of the options that say so."""
    from hetero.workload import statistics

    kind = chosen or ("scaled" if trace.own_bursts else "poisson")
    if kind == "poisson":
        return "poisson", rate
    own = statistics.rate_rps(trace.arrival_s)
    require(
        math.isfinite(own),
        f"--arrivals {kind}: all requests of {trace.name} arrive at once.",
        resolve="use --arrivals poisson, or name the column of the arrivals with --columns.",
    )
    require(
        kind == "scaled" or rate is None,
        "--arrivals trace is at the trace's own rate.",
        resolve="leave out --rate, or use --arrivals scaled.",
    )
    return "scaled", own if kind == "trace" else rate


def endpoint(url: str, model: str, timeout_s: float) -> Endpoint:
    """A server, with the key that the environment variable HETERO_API_KEY holds."""
    from hetero.apps.profiling import Endpoint

    return Endpoint(url, model, os.environ.get("HETERO_API_KEY", ""), timeout_s)


def arrivals(
    trace: Requests,
    requests: int | None,
    rate: float | None,
    seed: int,
    chosen: str | None = None,
    clients: int | None = None,
    think: float | None = None,
) -> tuple[Requests, str]:
    """The first requests as they came, at a rate as --arrivals says, or of clients; in words."""
    from hetero.simulator import sustained

    if requests is not None:
        trace = trace.head(min(requests, len(trace)))
    if clients is not None:
        require(
            rate is None and chosen is None,
            "--clients send requests when others are answered, at no rate of their own.",
            resolve="leave out --rate and --arrivals, or --clients.",
        )
        each = f"{clients} clients that each wait" if clients > 1 else "one client that waits"
        after = f" and {think:g} s more" if think else ""
        return trace.closed_loop(clients, think or 0.0), f"{each} for an answer{after}"
    require(
        think is None,
        "--think is the time that clients take between an answer and their next request.",
        resolve="give --clients, or leave it out.",
    )
    if rate is None:
        require(
            chosen in (None, "trace"),
            f"--arrivals {chosen} is at a rate.",
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
    process, _ = arriving(chosen, trace, rate)
    came = f"{sustained.ARRIVING[process]}, {rate:g} requests/s"
    if process == "scaled":
        return trace.rescale(rate_rps=rate), came
    return sustained.arrivals(trace, len(trace), rate, seed), came


def plain(one: Metrics) -> dict[str, Any]:
    """Metrics as JSON values; what is not a number becomes null."""
    from dataclasses import asdict

    record: dict[str, Any] = finite(asdict(one) | {"total_tps": one.total_tps})
    return record


def finite(value: Any) -> Any:
    """A value in which what is not a number, or infinite, becomes None.

    Examples
    --------
    >>> finite({"a": (1.0, math.inf)})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
