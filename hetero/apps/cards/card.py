"""The plan card: what a fleet should run, what that delivers, and what each figure rests on.

A card is plain data, so that it can be kept, read back and compared. ``to_json`` writes

``format``, ``version``
    ``"hetero plan card"`` and the number of this schema, 2.
``question``
    What was asked: ``cluster``, ``gpus`` (number by type), ``model``, ``trace``, ``rate_rps``,
    ``rate_given``, ``targets_s`` (by ``ttft``, ``tpot``, ``e2e``), ``goal``,
    ``budget_usd_per_h``, ``precision``, ``choose``, ``seed``, ``requests``, ``engine``,
    ``release``, ``memory_fraction``, ``kv_precision``, ``arrivals`` (``"poisson"``,
    ``"shuffled"`` or ``"scaled"``), ``speculate``, ``lora``, ``longest_tokens`` (of a request; 0
    if not known), ``checkpoint`` (hub id or path, where the model was named so).
``planner``, ``precision``, ``groups``, ``idle``, ``routing``
    The plan: which GPUs form which replicas. A group has ``count``, ``gpus`` (by type, of one
    replica), ``parallelism``, ``phase``, ``share`` (of the requests, all of them together; null
    where the router decides as it goes), ``names``, ``places`` (per replica the machine, GPU type,
    number of GPUs and layers of each stage) and ``engine`` (what each was planned with).
``goodput_rps``, ``served``, ``latencies``, ``usd_per_mtok``, ``usd_per_h``, ``bound``
    What it delivers. Every such figure has ``value``, ``seeds`` (one value per seed of the
    arrivals) and ``draws`` (one value per draw of the step times, with arrivals of its own).
``plan``
    The plan as a value (:mod:`hetero.plans`), which can be simulated on another trace.
``limits``, ``changes``, ``tried``, ``sources``, ``notes``, ``proof``
    What binds, what would change it, what was tried, where the figures come from, and what the
    search showed of all layouts.
``at_rates``
    What the plan does with less than its goodput and with more, with the arrivals of one seed:
    ``rate_rps``, ``met`` (share within all targets), ``latencies_s`` (P50, P90 and P99 by
    latency), ``usd_per_mtok``.

Times end in ``_s`` and are seconds, rates in ``_rps`` and are requests per second.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    TypeAdapter,
    ValidationError,
)

from hetero.catalog import EngineName
from hetero.display import Shown, Table
from hetero.encoding import finite
from hetero.errors import DataError, require
from hetero.files import text as text_of
from hetero.files import writing
from hetero.intervals import interval
from hetero.naming import Line
from hetero.plans import Plan

FORMAT, VERSION = "hetero plan card", 2

PART = "part of the plan"  # in place of a planner that was tried

PERCENTILES = (50, 90, 99)
"""Of the latencies of :class:`AtRate`."""

# What is computed from larger figures overflows.
_LARGEST = 1e30


def _bounded(value: float) -> float:
    if abs(value) > _LARGEST:
        raise ValueError("no figure is as large as that")
    return value


def _named(value: dict[str, Any]) -> dict[str, Any]:
    if unknown := value.keys() - {"ttft", "tpot", "e2e"}:
        raise ValueError(f"'{min(unknown)}' is none of ttft, tpot and e2e")
    return value


def _planned(value: Any) -> Any:
    try:
        return value if isinstance(value, Plan) else Plan.of_dict(value)
    except DataError as error:
        raise ValueError(error.what.removesuffix(".")) from None


Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    AfterValidator(_bounded),
]
"""A figure; JSON has null where there is none."""

_Known = Annotated[float, Field(ge=0, le=_LARGEST)]
_Count = Annotated[int, Field(ge=0, le=2**31)]
_Target = Annotated[float, Field(gt=0, le=_LARGEST)]
_Percent = Annotated[int, Field(ge=0, le=100)]
_Three = Annotated[tuple[Number, ...], Field(min_length=3, max_length=3)]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A figure with what is known of its spread.

    Attributes
    ----------
    value
        Mean over the seeds, with the step times as they are.
    seeds
        One value per seed of the arrivals.
    draws
        One value per draw of the step times from their expected error, each with arrivals of its
        own; empty where step times cannot be drawn.

    Examples
    --------
    >>> Sampled.of([4.0, 4.2], [3.0, 4.0, 5.0]).interval()
    (3.1, 4.9)
    """

    value: Number
    seeds: Annotated[tuple[Number, ...], Field(min_length=1)]
    draws: tuple[Number, ...] = ()

    @classmethod
    def of(cls, seeds: Any, draws: Any = ()) -> Sampled:
        """From values per seed and per draw."""
        values = [float(v) for v in seeds]
        return cls(float(np.mean(values)), tuple(values), tuple(float(v) for v in draws))

    def interval(self, share: float = 0.9) -> tuple[float, float]:
        """Central interval over step times and arrivals, or over arrivals alone.

        It reaches as far as the value, which the draws, being few, may all lie on one side of.
        """
        if not self.draws:
            return self.over_seeds()
        low, high = np.quantile(self.draws, [(1 - share) / 2, (1 + share) / 2])
        found = min(float(low), self.value), max(float(high), self.value)
        return round(found[0], 12), round(found[1], 12)

    def over_seeds(self, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the mean over the seeds."""
        return interval(self.seeds, confidence)


@dataclass(frozen=True, slots=True)
class CardQuestion:
    """What was asked; see the module for its fields."""

    cluster: Line
    gpus: dict[str, _Count]
    model: Line
    trace: str
    rate_rps: _Known
    rate_given: bool
    targets_s: Annotated[dict[str, _Target], AfterValidator(_named)]
    goal: Annotated[float, Field(gt=0, le=1)]
    budget_usd_per_h: _Known | None
    precision: Line
    choose: str
    seed: int
    requests: _Count
    engine: EngineName = "any"
    arrivals: Annotated[str, Field(pattern="^(poisson|shuffled|scaled)$")] = "poisson"
    release: Annotated[str, Field(pattern=r"^[0-9.]*$")] = ""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    longest_tokens: _Count = 0
    checkpoint: Line = ""
    kv_precision: Line = "fp16"
    speculate: Line = ""
    lora: Line = ""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that are alike.

    Attributes
    ----------
    places
        Per replica, the stages of its pipeline: machine, GPU type, number of GPUs, layers.
    engine
        Fields of their :class:`hetero.deployment.Engine` and ``kv_tokens``; empty where the plan
        is none of whole replicas.
    """

    count: Annotated[int, Field(ge=1, le=100_000)]
    gpus: dict[str, _Count]
    parallelism: Line
    phase: Annotated[str, Field(pattern="^(both|prefill|decode)$")]
    share: Number
    names: tuple[Line, ...]
    places: tuple[tuple[tuple[Line, Line, _Count, _Count], ...], ...] = ()
    engine: dict[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GoodputBound:
    """Proven upper bound on the rate of any plan of a kind, and how far the plan is below it."""

    rate_rps: _Known
    what: str
    gap_percent: Number


@dataclass(frozen=True, slots=True)
class Limit:
    """What the goodput gains where one thing is 10 % better."""

    name: str
    gain_percent: Number


@dataclass(frozen=True, slots=True)
class Limits:
    """What binds: in one sentence, the target missed first, and the gain by each thing."""

    binding: str
    sentence: str
    first_missed: str
    rows: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """What the goodput becomes after one change, with the same requests, gaps and step times."""

    what: str
    goodput_rps: Sampled
    gain_rps: Sampled
    usd_per_h: _Known | None
    how: str


@dataclass(frozen=True, slots=True)
class TriedPlanner:
    """A planner, or a part of the plan, that was tried: what it reached, or why it could not."""

    planner: str
    precision: str
    goodput_rps: Number
    usd_per_h: _Known | None
    bound_rps: _Known | None
    reason: str
    gpus: dict[str, _Count] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """Price, or the number of GPUs where one has none."""
        return float(sum(self.gpus.values())) if self.usd_per_h is None else self.usd_per_h


@dataclass(frozen=True, slots=True)
class AtRate:
    """What a plan does at a rate: share within all targets, latencies at :data:`PERCENTILES`."""

    rate_rps: _Known
    met: Number
    latencies_s: Annotated[dict[str, _Three], AfterValidator(_named)]
    usd_per_mtok: Number | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where the figures of a GPU type come from, and how far step times may be off."""

    gpu: str
    count: _Count
    step_times: str
    prefill_error_percent: Number
    decode_error_percent: Number
    data_sheet: str
    usd_per_gpu_h: _Known | None
    price: str


@dataclass(frozen=True, eq=False, repr=False)
class PlanCard(Shown):
    """An answer to act on, which :func:`hetero.plan` makes; see the module for its fields.

    Attributes
    ----------
    plan
        The plan itself, which can be simulated, drawn, exported and served.
    proof
        What the search showed of all layouts, in a sentence; empty where it did not search.
    promised_rps
        Rate that holds with 95 % confidence (:func:`hetero.apps.cards.delivery.promised`), 0 where
        none does; NaN in cards that were made before there was one.
    shuffled_rps
        Goodput with the requests in any order; NaN where they come so, or cannot.
    """

    question: CardQuestion
    planner: str
    precision: str
    groups: tuple[Replicas, ...]
    idle: dict[str, _Count]
    routing: Line
    goodput_rps: Sampled
    served: dict[str, Sampled]
    latencies_s: Annotated[dict[str, dict[_Percent, Sampled]], AfterValidator(_named)]
    usd_per_h: _Known | None
    usd_per_mtok: Sampled | None
    bound: GoodputBound | None
    limits: Limits | None
    changes: tuple[ChangeEffect, ...]
    tried: tuple[TriedPlanner, ...]
    sources: tuple[Source, ...]
    plan: Annotated[InstanceOf[Plan], BeforeValidator(_planned)]
    notes: tuple[str, ...] = ()
    at_rates: tuple[AtRate, ...] = ()
    proof: str = ""
    promised_rps: Number = math.nan
    shuffled_rps: Number = math.nan

    @property
    def headline_rps(self) -> float:
        """What can be promised, or the goodput where nothing can."""
        return self.promised_rps if self.promised_rps > 0 else self.goodput_rps.value

    def table(self) -> Table:
        """The replicas, the first of the card's tables."""
        from hetero.apps.cards.sections import replicas_table

        return replicas_table(self)

    def __str__(self) -> str:
        from hetero.apps.cards.sections import texts

        return "\n\n".join(texts(self))

    def _repr_html_(self) -> str:
        from hetero.apps.cards.page import fragment

        return fragment(self)

    def _lacking(self) -> str:
        """The first figure that is shown and not there; empty if there is none."""
        for name in self.question.targets_s:
            if name not in self.latencies_s:
                return f"the {name.upper()} that it has a target for"
        if self.usd_per_h is not None and self.usd_per_mtok is not None:
            for name in ("total_tps", "requests_per_s"):
                if name not in self.served or not self.served[name].value > 0:
                    return f"{name} under 'served'"
            if not self.goodput_rps.value > 0:
                return "a goodput above 0"
        return ""

    # In and out -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The card as JSON values; what is no number is null."""
        values = {f.name: finite(getattr(self, f.name)) for f in fields(self) if f.name != "plan"}
        return {"format": FORMAT, "version": VERSION} | values | {"plan": self.plan.to_dict()}

    def to_json(self) -> str:
        """The card as JSON text, as the module describes it."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def to_html(self) -> str:
        """The card as a page of its own, for light and dark screens and for paper."""
        from hetero.apps.cards.page import page

        return page(self)

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the card as JSON (``.json``) or as a page (``.html``)."""
        target = Path(path)
        require(
            target.suffix in (".json", ".html"),
            f"{target.name} ends neither in .json nor in .html.",
            resolve="end its name with one of them.",
        )
        text = self.to_json() if target.suffix == ".json" else self.to_html()
        with writing(target, force=force) as part:
            part.write_text(text, encoding="utf-8")

    @classmethod
    def from_json(cls, text: str, path: Path | str = "plan card") -> PlanCard:
        """Card that :meth:`to_json` wrote.

        Raises
        ------
        DataError
            If the text is no card, or one of another version.
        """
        again = "write it again with `hetero plan ... --json`."
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):  # a number of thousands of digits, too
            raise DataError("The file is not JSON.", path=path, resolve=again) from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise DataError("The file holds no plan card.", path=path, resolve=again)
        if (version := values.pop("version", None)) != VERSION:
            raise DataError(
                f"The plan card has version {version}; this hetero reads {VERSION}.",
                path=path,
                resolve=again,
            )
        try:
            card: PlanCard = _adapter().validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            said = first["msg"].removeprefix("Value error, ").lower()
            raise DataError(
                f"'{place}' of the plan card: {said}.", path=path, resolve=again
            ) from None
        if lacking := card._lacking():
            raise DataError(f"The plan card lacks {lacking}.", path=path, resolve=again)
        return card

    @classmethod
    def load(cls, path: Path | str) -> PlanCard:
        """Card of a JSON file.

        Raises
        ------
        DataError
            If the file cannot be read, or holds no card.
        """
        try:
            text = text_of(path)
        except (OSError, UnicodeDecodeError):
            what, way = "The file cannot be read", "give a card that `hetero plan --output` wrote."
            raise DataError(f"{what}: it is missing, or no text.", path=path, resolve=way) from None
        return cls.from_json(text, path)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[PlanCard]:
    return TypeAdapter(PlanCard)
