"""What params.yaml may hold: one section per notebook, its types, limits and units.

The file is read once, by this module, as YAML 1.2; papermill never sees it. ``python -m
pipelines.schema`` writes the table ``pipelines/PARAMETERS.md`` from the descriptions in
``pipelines/sections.py``.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import ValidationError

from hetero import paths
from hetero.errors import DataError, ParameterError
from hetero.files import parse_yaml
from pipelines.sections import SECTIONS, Section

Profile = Literal["smoke", "default", "paper"]
Source = Literal["twin", "real"]
PROFILES: Final[tuple[str, ...]] = get_args(Profile)
SOURCES: Final[tuple[str, ...]] = get_args(Source)
PAPER: Final = "paper"
"""Profile whose runs are kept apart, in a folder of that name."""


@dataclass(frozen=True, slots=True)
class Params:
    """What params.yaml says, checked, with the overlay of its profile laid over the defaults.

    Attributes
    ----------
    sections
        Parameters in force, by stage.
    overlaid
        By stage, the values of its section that do not count, because the profile has others.
    """

    profile: str
    source: str
    sections: Mapping[str, Section]
    overlaid: Mapping[str, Mapping[str, Any]]

    def of(self, stage: str) -> dict[str, Any]:
        """Typed parameters of one stage."""
        if stage not in self.sections:
            raise ParameterError(
                f"params.yaml has no section '{stage}'.",
                resolve=f"use one of {_or(self.sections)}{near(stage, self.sections)}.",
            )
        return self.sections[stage].model_dump()


def load(
    path: Path | None = None, *, source: str | None = None, profile: str | None = None
) -> Params:
    """Read and check params.yaml; every profile is checked, not only the one in force.

    Parameters
    ----------
    path
        The file; by default the one of this checkout.
    source
        ``twin`` or ``real``, instead of ``workload.source`` of the file.
    profile
        ``smoke``, ``default`` or ``paper``, instead of ``profile`` of the file.

    Raises
    ------
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
    return parse(text, path, source=source, profile=profile)


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
    _names(raw, ["profile", "workload", *SECTIONS], where=path.name)
    asked = raw["profile"] if profile is None else profile
    profile = _choice(asked, PROFILES, f"{path.name}, 'profile'")
    workload = _mapping(raw["workload"], f"{path.name}, 'workload'")
    _names(workload, ["source"], where=f"{path.name}, 'workload'")
    said = _choice(workload["source"], SOURCES, f"{path.name}, 'workload.source'")
    if source is not None:
        said = _choice(source, SOURCES, "the source asked for")
    sections, overlaid = {}, {}
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
        overlaid[name] = {one: body[one] for one in overlays.get(profile, {}) if one in body}
    return Params(profile, said, sections, overlaid)


def _yaml(text: str, path: Path) -> dict[str, Any]:
    return dict(_mapping(parse_yaml(text, path), path.name))


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
            f"{where}: got {_shown(value)}.", resolve=f"use {_or(known)}{near(str(value), known)}."
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
                f"{where}: the parameter is missing{tail}.", resolve=f"add it ({about})."
            ) from None
        other = first["msg"].replace("Input should be", "use a value that is", 1)
        raise ParameterError(
            f"{where}: got {_shown(first['input'])}{tail}.",
            resolve=f"{_NEEDS.get(first['type'], other)}.",
        ) from None


_NEEDS = {
    "int_type": "write a whole number, without quotes",
    "float_type": "write a number, without quotes",
    "bool_type": "write true or false, without quotes",
    "string_type": "write text",
    "list_type": "write a list, as in [1, 2]",
}


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
        "Written by `python -m pipelines.schema` from `pipelines/sections.py`; values stand in",
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
