"""What params.yaml may hold: one section per notebook, its types, limits and units.

The file is read once, by this module, as YAML 1.2; papermill never sees it. ``python -m
pipelines.schema`` writes the table ``pipelines/PARAMETERS.md`` from the descriptions below.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero import paths, yaml_text
from hetero.errors import DataError, ParameterError

Profile = Literal["smoke", "default", "paper"]
Source = Literal["twin", "real"]
PROFILES: Final[tuple[str, ...]] = get_args(Profile)
SOURCES: Final[tuple[str, ...]] = get_args(Source)


class Section(BaseModel):
    """Parameters of one notebook; nothing is converted and nothing unknown is let through."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Workloads(Section):
    """Parameters of 01_workloads."""

    seed: int = Field(ge=0, description="seed of the traces drawn from twins")
    draws: int = Field(ge=1, description="drawn traces that are compared with the real one")


class LatencyFitting(Section):
    """Parameters of 02_latency_fitting."""

    measurements: Literal["derived", "raw"] = Field(
        description="reductions in data/measured, or the published tables (to be fetched); with "
        "real traces the published tables are read wherever they are here"
    )


class TensorParallelSearch(Section):
    """Parameters of 03_tensor_parallel_search."""

    seeds: Seeds = Field(description="one sample of requests is drawn with each")
    requests: int = Field(ge=1, description="requests per sample of the estimate")
    duplicated: int = Field(
        ge=1, description="requests per sample of the simulation, each sent eight times"
    )
    overheads_ms: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=1, description="engine time per step for the sensitivity [ms]"
    )


class RequestScheduling(Section):
    """Parameters of 04_request_scheduling."""

    seeds: Seeds = Field(
        description="one sample of requests, arrivals and predictions is drawn with each"
    )
    requests: int = Field(ge=1, description="requests per sample; 4,000 in the paper")
    thetas: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=1, description="weights of the KV usage in eq. 7; 2 in the paper"
    )
    overheads_ms: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=1, description="engine time per step for the sensitivity [ms]"
    )
    trace_requests: int = Field(
        ge=2, description="requests of the conversation trace for the router of your own"
    )


Swept = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]


class HeteroServe(Section):
    """Parameters of 05_heteroserve."""

    seeds: list[Annotated[int, Field(ge=0)]] = Field(
        min_length=2, description="one workload each; intervals need at least two"
    )
    requests: int = Field(ge=100, description="requests per run; 10,000 in the paper")
    loads: Swept = Field(description="arrival rates over the nominal one")
    long_shares: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        min_length=1, description="shares of prompts above 2,048 tokens"
    )
    margins: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=1, description="safety margins delta; 0.1 in the paper"
    )
    queue_limits: Swept = Field(description="queue limits Q_max [requests]; 32 in the paper")
    dampings: Swept = Field(description="dampening factors lambda; 2 in the paper")


class IslandInnerLoop(Section):
    """Parameters of 06_island_inner_loop."""

    width_tokens: int = Field(ge=8, le=8000, description="W, width of a range of lengths [tokens]")
    lengths: int = Field(ge=8, description="input lengths at which 64 GPUs are benchmarked")
    replay_requests: int = Field(
        ge=1000,
        description="requests per played trace; below 200,000 the longest outputs are not over",
    )
    seed: int = Field(ge=0, description="seed of the played arrivals")


class IslandOuterLoop(Section):
    """Parameters of 07_island_outer_loop."""

    workloads: list[Literal["code", "conv"]] = Field(
        min_length=1, description="Azure traces of Table 5.1"
    )
    width_tokens: int = Field(ge=8, le=8000, description="W, width of a range of lengths [tokens]")
    seeds: Seeds = Field(description="trials of every search; 5 or 10 in the thesis")
    iterations: int = Field(
        ge=2, description="batches of the divider searches; 15 or 20 in the thesis"
    )
    batches: list[Annotated[int, Field(ge=2)]] = Field(
        min_length=2, description="layouts per batch"
    )
    skews: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=2, description="largest absolute skew of the divider"
    )
    minimums: list[Annotated[int, Field(ge=2)]] = Field(
        min_length=2, description="smallest island [GPUs], each twice the one before"
    )
    direct_iterations: int = Field(
        ge=2, description="batches of the direct searches; 10 in the thesis"
    )
    direct_batches: list[Annotated[int, Field(ge=2)]] = Field(
        min_length=2, description="layouts per batch of the direct searches"
    )
    slots: list[Annotated[int, Field(ge=2)]] = Field(
        min_length=2, description="K, islands per GPU type in the direct search"
    )
    saas_seeds: list[Annotated[int, Field(ge=0)]] = Field(
        description="trials with SAASBO; none leaves it out"
    )
    state: str = Field(
        description="folder of the checkout that searches are saved to and resumed from; none if "
        "empty"
    )


class LayerPlacement(Section):
    """Parameters of 08_layer_placement."""

    planned: list[str] = Field(
        min_length=1, description="settings that our planner plans, as cluster and model"
    )
    window_s: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=2,
        max_length=2,
        description="warm-up and end of the simulated offline serving [s]; 60 and 660 in the paper",
    )
    seed: int = Field(ge=0, description="seed of the planner's exchanges and of the requests")


class HelixServing(Section):
    """Parameters of 09_helix_serving."""

    settings: list[str] = Field(min_length=1, description="clusters and models that are served")
    offline_s: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=2, max_length=2, description="warm-up and end of offline serving [s]"
    )
    online_s: float = Field(ge=3, description="test of online serving [s]; 1800 in the paper")
    shares: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        min_length=1, description="of the largest KV cache per layer, in the chains that are tried"
    )
    shallow: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        description="shares of the largest flow for which shallower placements are sought"
    )
    seed: int = Field(ge=0, description="seed of requests, routers and planners")


class Fidelity(Section):
    """Parameters of 12_fidelity."""

    helix_offline_s: float = Field(
        gt=0, description="length of Helix's offline runs after a minute of warm-up [s]"
    )
    helix_online_s: float = Field(gt=0, description="length of Helix's online runs [s]")
    requests: int = Field(ge=100, description="requests per simulated plan")
    draws: int = Field(ge=10, description="draws of the step times")
    seed: int = Field(ge=0, description="seed of the draws and of the workload")


class PhaseSplitting(Section):
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


class ThunderServe(Section):
    """Parameters of 11_thunderserve."""

    seeds: Seeds = Field(description="one sample of requests and Poisson arrivals with each")
    requests: int = Field(ge=100, description="requests per simulated run")
    rates_rps: Swept = Field(description="arrival rates, rising [requests/s]")
    plan_scale: float = Field(gt=0, description="SLO scale that plans are made for")
    tabu_seeds: Seeds = Field(description="tabu searches with the paper's numbers of neighbours")
    tabu_steps: int = Field(ge=1, description="steps of each; 100 in the paper")
    max_stages: int = Field(ge=1, description="pipeline stages of a group; 2 in the paper's plans")
    search_steps: int = Field(
        ge=0, description="steps of the local search that follows the integer program"
    )
    hexgen_generations: int = Field(ge=1, description="generations of HexGen's search")
    loss_rate_rps: float = Field(gt=0, description="arrival rate when GPUs are lost [requests/s]")
    every_loss: list[Literal["coding", "conversation"]] = Field(
        description="workloads for which every group, machine and some links are lost in turn"
    )


SECTIONS: Final[dict[str, type[Section]]] = {
    "workloads": Workloads,
    "latency_fitting": LatencyFitting,
    "tensor_parallel_search": TensorParallelSearch,
    "request_scheduling": RequestScheduling,
    "heteroserve": HeteroServe,
    "island_inner_loop": IslandInnerLoop,
    "island_outer_loop": IslandOuterLoop,
    "layer_placement": LayerPlacement,
    "helix_serving": HelixServing,
    "phase_splitting": PhaseSplitting,
    "thunderserve": ThunderServe,
    "fidelity": Fidelity,
}


@dataclass(frozen=True, slots=True)
class Params:
    """What params.yaml says, checked, with the overlay of its profile laid over the defaults."""

    profile: str
    source: str
    sections: Mapping[str, Section]

    def of(self, stage: str) -> dict[str, Any]:
        """Typed parameters of one stage.

        Raises
        ------
        ParameterError
            If there is no such section.
        """
        if stage not in self.sections:
            raise ParameterError(
                f"params.yaml has no section '{stage}'.",
                resolve=f"use one of {_or(self.sections)}{near(stage, self.sections)}.",
            )
        return self.sections[stage].model_dump()


def load(path: Path | None = None, *, source: str | None = None) -> Params:
    """Read and check params.yaml; every profile is checked, not only the one in force.

    Parameters
    ----------
    path
        The file; by default the one of this checkout.
    source
        ``twin`` or ``real``, instead of ``workload.source`` of the file.

    Raises
    ------
    ParameterError
        If a name is unknown or missing, or a value has the wrong type or is out of range.
    DataError
        If the file is not plain YAML.
    """
    path = path or paths.root() / "params.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"The parameter file cannot be read ({error}).",
            path=path,
            resolve="restore it with `git checkout params.yaml`.",
        ) from error
    return parse(text, path, source=source)


def section(
    stage: str,
    over: Mapping[str, Any],
    *,
    profile: str,
    source: str,
    where: str,
    path: Path | None = None,
) -> dict[str, Any]:
    """Parameters of one stage in a profile, with some of them set anew.

    A value for a parameter that is a list is taken as a list of one.

    Raises
    ------
    ParameterError
        If a name is none of the stage's parameters, or a value is not as its section wants it.
    """
    file = path or paths.root() / "params.yaml"
    kind = SECTIONS.get(stage)
    if kind is None:
        raise ParameterError(
            f"{where}: there is no stage '{stage}'.",
            resolve=f"use one of {_or(SECTIONS)}{near(stage, SECTIONS)}.",
        )
    values = _parsed(file.read_text(encoding="utf-8"), file, source, profile).of(stage)
    for name, value in over.items():
        listed = isinstance(values.get(name), list) and not isinstance(value, list)
        values[name] = [value] if listed else value
    return _check(kind, values, Path(where), stage, {}, profile).model_dump()


@cache
def _parsed(text: str, path: Path, source: str, profile: str) -> Params:
    # A sweep asks for every one of its points, and reading the file takes longer than some points.
    return parse(text, path, source=source, profile=profile)


def plain_yaml(path: Path) -> dict[str, Any]:
    """Content of a YAML file of names and values, without aliases.

    Raises
    ------
    DataError
        If the file cannot be read, is too large, or is not plain YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(
            f"The file cannot be read ({reason}).", path=path, resolve="check its name."
        ) from error
    return _yaml(text, path)


def parse(
    text: str, path: Path, *, source: str | None = None, profile: str | None = None
) -> Params:
    """Check the text of a parameter file as ``load`` does; ``path`` only names it in errors."""
    raw = _yaml(text, path)
    known = ["profile", "workload", *SECTIONS]
    _names(raw, known, where=path.name)
    asked = raw["profile"] if profile is None else profile
    profile = _choice(asked, PROFILES, f"{path.name}, 'profile'")
    workload = _mapping(raw["workload"], f"{path.name}, 'workload'")
    _names(workload, ["source"], where=f"{path.name}, 'workload'")
    said = _choice(workload["source"], SOURCES, f"{path.name}, 'workload.source'")
    if source is not None:
        said = _choice(source, SOURCES, "the source asked for")
    sections = {}
    for name, kind in SECTIONS.items():
        body = dict(_mapping(raw[name], f"{path.name}, '{name}'"))
        overlays: dict[str, dict[str, Any]] = {
            one: dict(_mapping(body.pop(one), f"{path.name}, '{name}.{one}'"))
            for one in ("smoke", "paper")
            if one in body
        }
        layers = {"default": body} | {one: body | over for one, over in overlays.items()}
        checked = {
            one: _check(kind, layer, path, name, overlays.get(one, {}), one)
            for one, layer in layers.items()
        }
        sections[name] = checked.get(profile, checked["default"])
    return Params(profile, said, sections)


def _yaml(text: str, path: Path) -> dict[str, Any]:
    return dict(_mapping(yaml_text.parse(text, path), path.name))


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ParameterError(
        f"{where}: got {_shown(value)} where named values belong.",
        resolve="write `name: value` lines below it, indented by two spaces.",
    )


def _names(given: Mapping[str, Any], known: list[str], *, where: str) -> None:
    for name in given:
        if name not in known:
            raise ParameterError(
                f"{where}: '{name}' is unknown.",
                resolve=f"use {_or(known)}{near(str(name), known)}.",
            )
    for name in known:
        if name not in given:
            raise ParameterError(f"{where}: '{name}' is missing.", resolve="add it.")


def _choice(value: object, known: tuple[str, ...], where: str) -> str:
    if value not in known:
        raise ParameterError(
            f"{where}: got {_shown(value)}.",
            resolve=f"use {_or(known)}{near(str(value), known)}.",
        )
    return str(value)


def _check(
    kind: type[Section],
    values: dict[str, Any],
    path: Path,
    name: str,
    overlay: dict[str, Any],
    profile: str,
) -> Section:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # A misspelt name is also a missing one; the name written is what to mend.
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        top = str(first["loc"][0]) if first["loc"] else ""
        folder = f"{name}.{profile}" if top in overlay else name
        where = f"{path.name}, '{'.'.join([folder, *map(str, first['loc'])])}'"
        more = error.error_count() - 1
        tail = f" ({more} more such {'error' if more == 1 else 'errors'})" if more else ""
        fields = list(kind.model_fields)
        if first["type"] == "extra_forbidden":
            raise ParameterError(
                f"{where}: no parameter of notebook section '{name}' has this name{tail}.",
                resolve=f"use one of {_or(fields)}{near(top, fields)}.",
            ) from None
        if first["type"] == "missing":
            about = kind.model_fields[top].description if top in kind.model_fields else ""
            raise ParameterError(
                f"{where}: the parameter is missing{tail}.",
                resolve=f"add it ({about}).",
            ) from None
        raise ParameterError(
            f"{where}: got {_shown(first['input'])}{tail}.",
            resolve=f"{_need(first['type'], first['msg'])}.",
        ) from None


_NEEDS = {
    "int_type": "write a whole number, without quotes",
    "float_type": "write a number, without quotes",
    "bool_type": "write true or false, without quotes",
    "string_type": "write text",
    "list_type": "write a list, as in [1, 2]",
}


def _need(kind: str, message: str) -> str:
    if kind in _NEEDS:
        return _NEEDS[kind]
    return message.replace("Input should be", "use a value that is", 1)


def _shown(value: object) -> str:
    words = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    kind = words.get(type(value), "nothing" if value is None else type(value).__name__)
    return f"{reprlib.repr(value)} ({kind})"


def _or(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def near(name: str, known: Iterable[str]) -> str:
    """Text `` (did you mean x?)`` if a known name is close to the one given, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def documentation() -> str:
    """Text of ``pipelines/PARAMETERS.md``: every parameter with type, limits and meaning."""
    lines = [
        "# Parameters",
        "",
        "Written by `python -m pipelines.schema` from `pipelines/schema.py`; values stand in",
        "`params.yaml`. A section may hold `smoke:` and `paper:` with the values that differ in",
        "those profiles.",
        "",
        "| parameter | type | meaning |",
        "| --- | --- | --- |",
        f"| profile | {_options(PROFILES)} | how much is computed |",
        f"| workload.source | {_options(SOURCES)} | embedded twins, or fetched traces |",
    ]
    for section, kind in SECTIONS.items():
        for name, field in kind.model_fields.items():
            limits = "".join(f", {_limit(one)}" for one in field.metadata)
            lines.append(
                f"| {section}.{name} | {_type(field.annotation)}{limits} | {field.description} |"
            )
    return "\n".join(lines) + "\n"


def _options(names: tuple[str, ...]) -> str:
    return " or ".join(f"`{name}`" for name in names)


_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def _type(annotation: Any) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    inner = get_args(annotation)
    if inner and all(isinstance(one, str) for one in inner):
        return _options(inner)
    if hasattr(inner[0], "__metadata__"):
        base, *rest = get_args(inner[0])
        limits = "".join(f", {_limit(one)}" for field in rest for one in field.metadata)
        return f"list ({_type(base)}{limits})"
    return f"list ({_type(inner[0])})"


def _limit(constraint: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >="}
    found = [
        f"{sign} {getattr(constraint, key)}"
        for key, sign in signs.items()
        if hasattr(constraint, key)
    ]
    return ", ".join(found) or str(constraint)


def main() -> None:
    """Write ``pipelines/PARAMETERS.md``."""
    (paths.root() / "pipelines" / "PARAMETERS.md").write_text(documentation(), encoding="utf-8")


if __name__ == "__main__":
    main()
