"""What a sweep file says: a notebook, the points over its parameters, and what to read off each."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hetero.errors import ParameterError, require
from pipelines import dependencies, schema

_MOST_POINTS = 100_000


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Range(_Part):
    """Values from ``low`` to ``high``, whole ones if ``whole``; ``log`` spreads them by ratio."""

    low: float
    high: float
    whole: bool = False
    log: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.low < self.high:
            raise ValueError("a range needs a low end below its high end")
        if self.log and self.low <= 0:
            raise ValueError("a range by ratio needs a low end above 0")
        return self


Ranges = Annotated[dict[str, Range], Field(min_length=1)]
Values = Annotated[list[Any], Field(min_length=1)]


class Sobol(_Part):
    """Points of a scrambled Sobol sequence."""

    count: int = Field(ge=1, le=100_000)
    seed: int = Field(default=0, ge=0)
    ranges: Ranges


class Search(_Part):
    """Bayesian optimisation with Ax: the measure to make large (or small), and for how long."""

    trials: int = Field(ge=1, le=10_000)
    batch: int = Field(default=8, ge=1, le=256)
    seed: int = Field(default=0, ge=0)
    ranges: Ranges
    maximise: str | None = None
    minimise: str | None = None

    @model_validator(mode="after")
    def _one_aim(self) -> Search:
        if (self.maximise is None) == (self.minimise is None):
            raise ValueError("a search needs either 'maximise' or 'minimise', with a measure")
        return self


class Measure(_Part):
    """A number of a point: a cell of a table that the notebook saves, or a claim it records.

    ``where`` picks rows by the value of a column; ``{parameter: NAME}`` stands for the point's own
    value of a parameter. ``within`` names the ends of what it can be, as 0 and 100 of a share: its
    interval stays between them, and its changes are differences instead of ratios.
    """

    table: str = ""
    column: str = ""
    where: dict[str, Any] = Field(default_factory=dict)
    reduce: Literal["mean", "min", "max", "median", "sum"] = "mean"
    claim: str = ""
    within: tuple[float, float] | None = Field(default=None, strict=False)

    @model_validator(mode="after")
    def _one_kind(self) -> Measure:
        if bool(self.claim) == bool(self.table and self.column):
            raise ValueError("a measure needs 'table' and 'column', or a 'claim'")
        if Path(self.table).name != self.table:
            raise ValueError("a table is a name that the notebook saves, not a path")
        if self.within and not self.within[0] < self.within[1]:
            raise ValueError("'within' needs a low end below its high end")
        return self


class Sweep(_Part):
    """One sweep file.

    A parameter of a list type takes a single swept value as a list of one, so that
    ``thetas: [0.0, 2.0]`` under ``grid`` means two points. Under ``along`` one run takes the whole
    list, and each value becomes a row; ``where`` then picks its own by ``{parameter: thetas}``.
    ``against`` names the value that the others of a parameter are compared with, repeat by repeat.
    """

    stage: str
    profile: Literal["smoke", "default", "paper"] = "default"
    source: Literal["twin", "real"] = "twin"
    fixed: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Values] | None = None
    points: list[dict[str, Any]] | None = None
    sobol: Sobol | None = None
    search: Search | None = None
    along: dict[str, Values] = Field(default_factory=dict, max_length=1)
    repeat: dict[str, Values] = Field(default_factory=dict)
    against: dict[str, Any] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    measures: Annotated[dict[str, Measure], Field(min_length=1)]
    limit_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _one_design(self) -> Sweep:
        given = [n for n in ("grid", "points", "sobol", "search") if getattr(self, n) is not None]
        if len(given) != 1 and not (self.along and not given):
            raise ValueError("a sweep needs one of 'grid', 'points', 'sobol', 'search', or 'along'")
        if self.along and self.search is not None:
            raise ValueError("a search has nothing to run along")
        for name, value in self.against.items():
            if value not in ({**(self.grid or {}), **self.along}).get(name, ()):
                raise ValueError(f"'against' compares with {name} = {value!r}, which is not run")
        if self.against and not self.repeat:
            raise ValueError("'against' compares repeat by repeat, and there is no 'repeat'")
        return self

    @property
    def swept(self) -> tuple[str, ...]:
        """Names of the parameters that vary, repeats left out."""
        chosen = self.sobol or self.search
        if self.points is not None:
            names = [name for point in self.points for name in point]
        else:
            names = list(self.grid or (chosen.ranges if chosen else ()))
        return tuple(dict.fromkeys([*names, *self.along]))

    def label(self, name: str) -> str:
        """How a figure names a parameter."""
        return self.labels.get(name, name)


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the notebook.

    Attributes
    ----------
    swept, repeat
        Values that vary, and those that only repeat it.
    parameters
        All parameters of the notebook's section, checked.
    """

    swept: dict[str, Any]
    repeat: dict[str, Any]
    parameters: dict[str, Any]

    def key(self, rests_on: str) -> str:
        """Name of its folder: a digest of the parameters and of what the result rests on."""
        text = json.dumps([self.parameters, rests_on], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(path: Path | str) -> Sweep:
    """Read and check a sweep file.

    Raises
    ------
    DataError
        If it is not plain YAML.
    """
    file = Path(path)
    raw = schema.plain_yaml(file)
    try:
        return Sweep.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ParameterError(
            f"{file.name}{f', {where!r}' if where else ''}: {message}{more}.",
            resolve="compare it with pipelines/sweeps/theta.yaml.",
        ) from None


def points(sweep: Sweep, name: str = "the sweep") -> list[Point]:
    """Every point of a grid, a list or a Sobol sequence, times its repeats."""
    if sweep.grid is not None:
        total = math.prod(map(len, (*sweep.grid.values(), *sweep.repeat.values())))
        require(
            total <= _MOST_POINTS,
            f"{name} has {total:,} points; {_MOST_POINTS:,} are allowed.",
            resolve="give fewer values, or let 'sobol' spread points over their ranges.",
        )
        swept = [
            dict(zip(sweep.grid, values, strict=True))
            for values in itertools.product(*sweep.grid.values())
        ]
    elif sweep.points is not None:
        swept = [dict(point) for point in sweep.points]
    elif sweep.sobol is not None:
        swept = _sobol(sweep.sobol)
    elif sweep.along:
        swept = [{}]
    else:
        raise ParameterError(
            f"{name} is a search, whose points follow from results.", resolve="run it."
        )
    return [point for one in swept for point in repeated(sweep, one, name)]


def digest(sweep: Sweep) -> str:
    """What points rest on: when the code or data of the notebook change, points are new."""
    state = [dependencies.state(sweep.stage), sweep.stage, sweep.profile, sweep.source]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def stale(file: Path, folder: Path) -> bool:
    """Whether the code, data or parameters of a sweep changed since its points in ``folder``."""
    lines = (folder / "points.csv").read_text(encoding="utf-8").splitlines()[1:]
    rests_on = digest(sweep := read(file))
    return {one.partition(",")[0] for one in lines} != {one.key(rests_on) for one in points(sweep)}


def repeated(sweep: Sweep, swept: Mapping[str, Any], name: str = "the sweep") -> list[Point]:
    """One setting with each of its repeats."""
    repeats = [
        dict(zip(sweep.repeat, values, strict=True))
        for values in itertools.product(*sweep.repeat.values())
    ]
    return [
        Point(
            dict(swept),
            repeat,
            schema.section(
                sweep.stage,
                dict(sweep.fixed) | dict(sweep.along) | dict(swept) | repeat,
                profile=sweep.profile,
                source=sweep.source,
                where=name,
            ),
        )
        for repeat in repeats
    ]


def _sobol(design: Sobol) -> list[dict[str, Any]]:
    from scipy.stats import qmc

    sampler = qmc.Sobol(len(design.ranges), seed=design.seed)
    # Whole powers of two keep the sequence balanced; what is over is left out.
    return [
        {
            name: scaled(one, float(u))
            for (name, one), u in zip(design.ranges.items(), row, strict=True)
        }
        for row in sampler.random_base2(math.ceil(math.log2(design.count)))[: design.count]
    ]


def scaled(one: Range, unit: float) -> float | int:
    """The value of a range at a place between 0 and 1."""
    value = (
        one.low * (one.high / one.low) ** unit if one.log else one.low + unit * (one.high - one.low)
    )
    return round(value) if one.whole else value
