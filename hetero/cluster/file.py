"""Cluster files: small YAML files that say which machines there are and how they are linked.

A file looks like this; everything but ``machines`` may be left out::

    name: my-fleet
    source: inventory of March
    machines:
      - {name: big, gpu: H100-SXM, count: 8, region: eu, usd_per_h: 20.5}
      - {name: small, gpu: L4, copies: 3, region: us}      # small-1, small-2, small-3
      - {name: old, gpu: V100-SXM2-32GB, count: 4, link: PCIe3-x16, region: us}
    network:
      within_region: {bandwidth_gbit_s: 40, latency_ms: 0.1}
      between_regions: {link: WAN-100M}
      pairs:
        - {between: [eu, us], bandwidth_gbit_s: 1, latency_ms: 90}       # regions or machines
      coordinator: {region: eu}          # or one link to all: {bandwidth_gbyte_s: 1, latency_ms: 2}

A name has at most 100 letters, digits, spaces and ``. _ - + = : , @ / ( )``, a letter or digit
first: it will be that of a host, a file or a label. ``gpu`` is a name of the catalog or of the
file's own ``gpus`` section, whose entries take the fields of :class:`hetero.catalog.Gpu`.
``preset`` names a paper whose printed figures replace those of the data sheets.
``bandwidth_gbit_s`` counts bits, ``bandwidth_gbyte_s`` bytes.
"""

from __future__ import annotations

import difflib
import reprlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from hetero import catalog
from hetero.catalog import Gpu, Link
from hetero.cluster import Cluster, Machine, Network, found
from hetero.errors import CatalogError, DataError
from hetero.files import text as text_of
from hetero.naming import RULE, Name, good, one_line, slug

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Every copy becomes an object: a slip of the keyboard must not fill the memory.
_Count = Annotated[int, Field(gt=0, le=100_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _LinkText(_Strict):
    link: Name | None = None
    bandwidth_gbit_s: _Positive | None = None
    bandwidth_gbyte_s: _Positive | None = None
    latency_ms: _NotNegative | None = None


class _PairText(_LinkText):
    between: Annotated[list[Name], Field(min_length=2, max_length=2)]


class _CoordinatorText(_LinkText):
    region: Name | None = None


class _NetworkText(_Strict):
    within_region: _LinkText | None = None
    between_regions: _LinkText | None = None
    coordinator: _CoordinatorText | None = None
    pairs: list[_PairText] = []


class _MachineText(_Strict):
    name: Name
    gpu: Name
    count: _Count = 1
    copies: _Count | None = None
    region: Name = "local"
    usd_per_h: _NotNegative | None = None
    link: Name | None = None


class GpuText(_Strict):
    """A device that the catalog lacks, with the fields of :class:`hetero.catalog.Gpu`."""

    mem_gib: _Positive
    mem_bw_gbs: _Positive
    fp16_tflops: _Positive
    link_type: Name = "PCIe4-x16"
    link_gbs: _Positive = 32.0
    pcie_gbs: _Positive = 32.0
    vendor: str = ""
    visible_gib: _Positive | None = None
    fp8_tflops: _Positive | None = None
    fp4_tflops: _Positive | None = None
    peak: str = "dense tensor, fp32 accumulation"
    tdp_w: _Positive | None = None
    precisions: list[str] = ["fp32", "fp16"]
    usd_per_h: _NotNegative | None = None
    price_source: str = ""
    source: str = "cluster file"
    checked: str = ""
    notes: str = ""

    def gpu(self, name: str) -> Gpu:
        """The device under its name."""
        fields: dict[str, Any] = self.model_dump()
        return Gpu(name=name, **{**fields, "precisions": tuple(self.precisions)})


class _ClusterText(_Strict):
    name: Name | None = None
    title: str = ""
    source: str = ""
    notes: list[str] = []
    preset: str = ""
    gpus: dict[Name, GpuText] = {}
    machines: Annotated[list[_MachineText], Field(min_length=1)]
    network: _NetworkText | None = None


def load(path: Path) -> Cluster:
    """Cluster of a file; without a ``name`` it is called as the file.

    Raises
    ------
    CatalogError
        If the file is missing, is no YAML, or states something unknown or impossible.
    """
    raw = _read(path)
    try:
        text = _ClusterText.model_validate(raw)
    except ValidationError as error:
        raise _sentence(path, raw, error) from None
    try:
        return Cluster(
            name=text.name or (path.stem if good(path.stem) else slug(path.stem)),
            machines=tuple(m for entry in text.machines for m in _machines(entry, text, path)),
            network=_network(text, path) if text.network else None,
            title=text.title,
            source=text.source,
            preset=text.preset,
            notes=tuple(text.notes),
        )
    except CatalogError as error:
        if error.what.startswith(str(path)):
            raise
        raise CatalogError(f"{path}: {error.what}", resolve=error.resolve) from None


def _read(path: Path) -> object:
    several = "," in str(path) and not path.exists()
    parts = [Path(one) for one in str(path).split(",") if one] if several else []
    parts = [one for one in sorted(path.iterdir()) if one.is_file()] if path.is_dir() else parts
    if parts:
        return found.together(map(_read, parts), parts)
    try:
        return found.form(text_of(path), path)
    except FileNotFoundError:
        raise CatalogError(
            f"{path}: there is no such file.",
            resolve="give the path of a cluster file or list of GPUs, or a shipped cluster's name.",
        ) from None
    except (OSError, UnicodeDecodeError):
        raise CatalogError(f"{path}: this is no text file.", resolve="save it as UTF-8.") from None
    except DataError as error:
        raise CatalogError(error.what, resolve=error.resolve) from None


def _machines(entry: _MachineText, text: _ClusterText, path: Path) -> list[Machine]:
    try:
        gpu = _gpu(entry.gpu, text)
        link = catalog.link(entry.link) if entry.link else None
    except CatalogError as error:
        raise CatalogError(
            f"{path}: machine '{entry.name}': {error.what}", resolve=error.resolve
        ) from None
    return [
        Machine(
            name=name,
            gpu=gpu,
            count=entry.count,
            region=entry.region,
            usd_per_h=entry.usd_per_h,
            link=link,
        )
        for name in _names(entry)
    ]


def _names(entry: _MachineText) -> list[str]:
    copies = range(entry.copies or 0)
    return [f"{entry.name}-{k + 1}" for k in copies] if entry.copies else [entry.name]


def _gpu(name: str, text: _ClusterText) -> Gpu:
    own = text.gpus.get(name)
    return catalog.gpu(name, preset=text.preset or None) if own is None else own.gpu(name)


def _network(text: _ClusterText, path: Path) -> Network:
    assert text.network is not None
    machines = {name for entry in text.machines for name in _names(entry)}
    regions = {m.region for m in text.machines}
    by_region: dict[frozenset[str], Link] = {}
    by_machine: dict[frozenset[str], Link] = {}
    for pair in text.network.pairs:
        ends = frozenset(pair.between)
        where = f"network.pairs {' and '.join(pair.between)}"
        are_regions, are_machines = ends <= regions, ends <= machines
        if len(ends) < 2 or are_regions == are_machines:
            kind = "both regions and machines" if are_regions else "no two regions or machines"
            unknown = min(ends - regions - machines, default="")
            near = difflib.get_close_matches(unknown, sorted(regions | machines), n=3)
            raise CatalogError(
                f"{path}: {where}: these are {kind} of the cluster.",
                resolve=f"use {' or '.join(near) or 'two different names under machines'}.",
            )
        out = by_region if are_regions else by_machine
        if ends in out:
            raise CatalogError(f"{path}: {where}: the pair is there twice.", resolve="keep one.")
        out[ends] = _link(pair, path, where)

    def stated(name: str) -> Link | None:
        given = getattr(text.network, name)
        return _link(given, path, f"network.{name}") if given is not None else None

    coordinator = text.network.coordinator
    region = coordinator.region if coordinator is not None else None
    if region is not None and coordinator != _CoordinatorText(region=region):
        raise CatalogError(
            f"{path}: network.coordinator gives a region and a link.",
            resolve="give the region it stands in, or one link to all machines.",
        )
    return Network(
        within_region=stated("within_region"),
        between_regions=stated("between_regions"),
        regions=by_region,
        machines=by_machine,
        coordinator=stated("coordinator") if region is None else None,
        coordinator_region=region or "",
    )


def _link(text: _LinkText, path: Path, where: str) -> Link:
    given = [
        name
        for name in ("link", "bandwidth_gbit_s", "bandwidth_gbyte_s")
        if getattr(text, name) is not None
    ]
    if len(given) != 1:
        raise CatalogError(
            f"{path}: {where} gives {' and '.join(given) or 'no bandwidth'}.",
            resolve="give one of link, bandwidth_gbit_s (bits) or bandwidth_gbyte_s (bytes).",
        )
    if text.link is not None:
        try:
            named = catalog.link(text.link)
        except CatalogError as error:
            raise CatalogError(f"{path}: {where}: {error.what}", resolve=error.resolve) from None
        if text.latency_ms is None:
            return named
        bandwidth, name = named.bandwidth_gbs, named.name
    else:
        bandwidth = (
            text.bandwidth_gbit_s / 8
            if text.bandwidth_gbit_s is not None
            else float(text.bandwidth_gbyte_s or 0.0)
        )
        name = where
        if text.latency_ms is None:
            raise CatalogError(f"{path}: {where} gives no latency.", resolve="add latency_ms.")
    return Link(
        name=name,
        bandwidth_gbs=bandwidth,
        latency_s=text.latency_ms / 1e3,
        kind="network",
        source=f"{path.name}",
    )


def _sentence(path: Path, raw: object, error: ValidationError) -> CatalogError:
    """The first thing that is wrong in a file, as one sentence with its place."""
    first = error.errors()[0]
    place, value = "", raw
    for key in first["loc"][:-1]:
        place, value = _step(place, value, key)
    last = first["loc"][-1] if first["loc"] else ""
    inside = f" of {place}" if place else ""
    if first["type"] == "extra_forbidden":
        model = _model_at(first["loc"])
        near = difflib.get_close_matches(str(last), model.model_fields, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return CatalogError(
            f"{path}: the field '{last}'{inside} is unknown.",
            resolve=f"{hint}known are {', '.join(model.model_fields)}.",
        )
    if first["type"] == "missing":
        return CatalogError(
            f"{path}: the field '{last}'{inside} is missing.", resolve=f"add {last}."
        )
    if last == "[key]":
        place, last = "", place.partition(".")[0]
        inside = ""
    whole, _ = _step(place, value, last) if isinstance(last, int) else ("", None)
    name = whole or (f"'{last}'{inside}" if last != "" else "the file")
    received = "empty" if first["input"] is None else reprlib.repr(first["input"])
    return CatalogError(f"{path}: {name} is {received}.", resolve=f"give {_wanted(first)}.")


def _step(place: str, value: object, key: int | str) -> tuple[str, object]:
    """One level deeper: the place in words and the value there."""
    if isinstance(key, int):
        item = value[key] if isinstance(value, list) and key < len(value) else None
        own = item.get("name") if isinstance(item, dict) else None
        ends = item.get("between") if isinstance(item, dict) else None
        called = f"'{one_line(own)}'" if isinstance(own, str) else f"number {key + 1}"
        if isinstance(ends, list) and len(ends) == 2:
            called += f" ({one_line(str(ends[0]))} and {one_line(str(ends[1]))})"
        singular = {"machines": "machine", "network.pairs": "pair"}.get(place, f"{place} entry")
        return f"{singular} {called}", item
    inner = value.get(key) if isinstance(value, dict) else None
    return (f"{place}.{key}" if place else str(key)), inner


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Which part of the form a place belongs to."""
    keys = [key for key in loc[:-1] if isinstance(key, str)]
    if not keys:
        return _ClusterText
    parts: dict[str, type[BaseModel]] = {
        "machines": _MachineText,
        "gpus": GpuText,
        "pairs": _PairText,
        "coordinator": _CoordinatorText,
        "network": _NetworkText if len(keys) == 1 else _LinkText,
    }
    return parts[keys[-1]] if keys[-1] in parts else parts[keys[0]]


def _wanted(error: ErrorDetails) -> str:
    """What a field takes, in words."""
    limits = error.get("ctx", {})
    words = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "string_type": "text",
        "list_type": "a list",
        "finite_number": "a finite number",
        "greater_than": f"a number above {limits.get('gt', 0):g}",
        "less_than_equal": f"a number of at most {limits.get('le', 0):,}",
        "greater_than_equal": f"a number of {limits.get('ge', 0):g} or more",
        "string_too_short": "text that is not empty",
        "value_error": RULE,
        "too_short": f"a list of {limits.get('min_length')} or more",
        "too_long": f"a list of {limits.get('max_length')} or fewer",
    }
    return words.get(error["type"], "a section of named fields")
