"""GPUs, with the figures of their data sheets or as a paper prints them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from hetero import paths
from hetero.catalog.precision import PRECISION_BITS
from hetero.catalog.tables import Records, key_of, read_table
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Shown):
    """One kind of link: a message of ``n`` bytes takes ``latency_s + n / bandwidth``.

    Attributes
    ----------
    bandwidth_gbs
        Bandwidth per direction [GB/s, 1e9 bytes per second]; data sheets often print both
        directions together. It is the line rate: what a transfer reaches is a matter of the
        latency model.
    latency_s
        Time before the first byte arrives [s].

    Examples
    --------
    >>> link("NVLink4").bandwidth_gbs
    450.0
    >>> round(link("Ethernet-40G").seconds(1.64e9), 3)
    0.328
    """

    name: str
    bandwidth_gbs: float
    latency_s: float
    kind: str = ""
    source: str = ""
    checked: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        if not (self.bandwidth_gbs > 0 and self.latency_s >= 0):
            raise CatalogError(
                f"Link '{self.name}' has bandwidth {self.bandwidth_gbs} GB/s and latency "
                f"{self.latency_s} s.",
                resolve="give a bandwidth above 0 and a latency of 0 or more.",
            )

    @property
    def aliases(self) -> tuple[str, ...]:
        """Links have no other names."""
        return ()

    def seconds(self, size_bytes: float) -> float:
        """Time [s] of one message of ``size_bytes``."""
        return self.latency_s + size_bytes / (self.bandwidth_gbs * 1e9)

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of links shows of each."""
        return (
            Column("link", of="name"),
            Column("kind"),
            Column("bandwidth per direction", "GB/s", of="bandwidth_gbs"),
            Column("latency", "us", of=lambda link: link.latency_s * 1e6),
            Column("source"),
        )

    def table(self) -> Table:
        """The link as one line."""
        return Table.of("", self.columns(), [self], self.notes)


@lru_cache(maxsize=1)
def links() -> Records[Link]:
    """All links of ``data/specs/links.csv``."""
    return read_table(paths.data("specs", "links.csv"), "link", Link)


def link(name: str) -> Link:
    """Link of that name.

    Raises
    ------
    CatalogError
        If there is none, with the nearest names.
    """
    return links().find(name)


_VISIBLE = 0.99
_SAME_SIZE = 0.08  # vendors round, and write GB for GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Shown):
    """One type of GPU.

    Attributes
    ----------
    mem_gib, visible_gib
        Memory [GiB]; vendors write GB for it. Drivers and error correction hold some of it back:
        the second is what CUDA and HIP report to a process, None where no source gives it.
    mem_bw_gbs
        Memory bandwidth [GB/s].
    fp16_tflops, fp8_tflops, fp4_tflops
        Peak rate of matrix products [TFLOPS], of the kind that ``peak`` says: dense, on tensor
        cores, accumulated in fp32 unless a preset prints something else. None where the GPU has
        no such unit or no source gives it.
    link_type, link_gbs
        Link to the GPUs of the same machine, a name of ``links.csv`` where it is one, and its
        bandwidth per direction [GB/s].
    pcie_gbs
        Bandwidth to the host, or to the network where a preset says so, per direction [GB/s].
    tdp_w
        Power limit [W].
    usd_per_h
        Price of one GPU [$/h] from the place and time in ``price_source``. Prices of different
        rows come from different clouds and dates: compare costs with care.
    precisions
        Data types the matrix units compute in.
    preset
        Empty for data sheet figures, else the paper whose printed figures replace them.
    checked
        ``yes``, ``partly`` or ``no``: how far independent sources confirm the row.

    Examples
    --------
    >>> gpu("A40").fp16_tflops, gpu("A40").mem_bytes == 48 * 2**30
    (149.7, True)
    """

    name: str
    mem_gib: float
    mem_bw_gbs: float
    fp16_tflops: float
    link_type: str
    link_gbs: float
    pcie_gbs: float
    vendor: str = ""
    visible_gib: float | None = None
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    peak: str = "dense tensor, fp32 accumulation"
    tdp_w: float | None = None
    precisions: tuple[str, ...] = ("fp32", "fp16")
    usd_per_h: float | None = None
    price_source: str = ""
    preset: str = ""
    aliases: tuple[str, ...] = ()
    in_papers: tuple[str, ...] = ()
    source: str = ""
    checked: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        needed = ("mem_gib", "mem_bw_gbs", "fp16_tflops", "link_gbs", "pcie_gbs")
        for field in (*needed, "visible_gib", "fp8_tflops", "fp4_tflops", "tdp_w", "usd_per_h"):
            value = getattr(self, field)
            if value is None and field not in needed:
                continue
            if not 0 <= value < float("inf") or (value == 0 and field in needed):
                raise CatalogError(
                    f"GPU '{self.name}' has {field} = {value}.",
                    resolve="give a number above 0 in the unit of the field's name.",
                )
        unknown = set(self.precisions) - PRECISION_BITS.keys()
        if unknown:
            raise CatalogError(
                f"GPU '{self.name}' lists the unknown precision '{min(unknown)}'.",
                resolve=f"use {', '.join(PRECISION_BITS)}.",
            )

    def linked(self, link: Link) -> Gpu:
        """The same GPU with another link to its peers."""
        return dataclasses.replace(self, link_type=link.name, link_gbs=link.bandwidth_gbs)

    @property
    def mem_bytes(self) -> int:
        """Memory [bytes]."""
        return round(self.mem_gib * 2**30)

    @property
    def visible_bytes(self) -> float:
        """Memory that a process sees [bytes]: 99 % where no source gives it, the usual share.

        Examples
        --------
        >>> gpu("L4").visible_bytes < gpu("A10").visible_bytes < gpu("RTX-4090").visible_bytes
        True
        """
        share = self.visible_gib / self.mem_gib if self.visible_gib else _VISIBLE
        return min(share, 1.0) * self.mem_bytes

    @property
    def _rates(self) -> dict[str, float | None]:
        return {
            "fp16": self.fp16_tflops,
            "bf16": self.fp16_tflops,
            "fp8": self.fp8_tflops,
            "fp4": self.fp4_tflops,
        }

    @property
    def rated(self) -> tuple[str, ...]:
        """Data types that the matrix units compute in at a peak rate that is known."""
        return tuple(p for p in self.precisions if self._rates.get(p) is not None)

    def peak_tflops(self, precision: str = "fp16") -> float:
        """Peak rate of matrix products in a precision [TFLOPS], of the kind ``peak`` says.

        Raises
        ------
        CatalogError
            If the GPU does not compute in it, or the catalog has no figure for it.
        """
        rate = self._rates.get(precision)
        if precision not in self.precisions or rate is None:
            reason = (
                "has no peak rate in the catalog for"
                if precision in self.precisions
                else "does not compute in"
            )
            raise CatalogError(
                f"GPU '{self.name}' {reason} {precision}.",
                resolve=f"use {' or '.join(self.rated)}.",
            )
        return rate

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of GPUs shows of each."""
        return (
            Column("GPU", of="name"),
            Column("memory", "GiB", of="mem_gib"),
            Column("bandwidth", "GB/s", of="mem_bw_gbs"),
            Column("fp16", "TFLOPS", of="fp16_tflops"),
            Column("fp8", "TFLOPS", of="fp8_tflops"),
            Column("link", of="link_type"),
            Column("link", "GB/s", of="link_gbs"),
            Column("power", "W", of="tdp_w"),
            Column("price", "$/h", of="usd_per_h"),
            Column("checked"),
        )

    def table(self) -> Table:
        """The GPU as one line, with what its figures are and where they come from."""
        price = f"Price: {self.price_source}." if self.usd_per_h is not None else ""
        figures = f"As printed by {self.preset}: " if self.preset else ""
        first = f"{figures}{self.peak}. Source: {self.source}."
        return Table.of("", self.columns(), [self], first, price, self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Printed:
    """One row of gpu_presets.csv: what a paper prints about a GPU; None where it is silent."""

    preset: str
    gpu: str
    printed_name: str
    source: str
    peak: str | None = None
    fp16_tflops: float | None = None
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    mem_gib: float | None = None
    mem_bw_gbs: float | None = None
    link_type: str | None = None
    link_gbs: float | None = None
    pcie_gbs: float | None = None
    tdp_w: float | None = None
    usd_per_h: float | None = None
    price_source: str | None = None
    notes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """One row of gpu_names.csv; ``*`` stands for anything."""

    gpu: str
    names: tuple[str, ...]
    source: str
    skypilot: str = ""


@lru_cache(maxsize=1)
def _data_sheets() -> Records[Gpu]:
    return read_table(paths.data("specs", "gpus.csv"), "GPU", Gpu)


@lru_cache(maxsize=1)
def _presets() -> dict[str, Records[Gpu]]:
    grouped: dict[str, list[Gpu]] = {}
    from hetero.rows import read_records

    for row in read_records(paths.data("specs", "gpu_presets.csv"), _Printed):
        base = _data_sheets().find(str(row.pop("gpu")))
        names = {*base.aliases, str(row.pop("printed_name"))} - {base.name}
        grouped.setdefault(str(row["preset"]), []).append(
            dataclasses.replace(base, aliases=tuple(sorted(names)), **row)  # type: ignore[arg-type]
        )
    return {
        preset: Records(f"GPU of the preset '{preset}'", found) for preset, found in grouped.items()
    }


def presets() -> tuple[str, ...]:
    """Names of the papers whose printed figures can replace the data sheets'."""
    return tuple(_presets())


def gpus(preset: str | None = None) -> Records[Gpu]:
    """All GPUs of ``data/specs/gpus.csv``, or those that a paper prints figures of.

    Raises
    ------
    CatalogError
        If the preset is unknown.
    """
    if not preset:
        return _data_sheets()
    if preset not in _presets():
        raise CatalogError(
            f"No GPU preset is called '{preset}'.", resolve=f"use one of {', '.join(presets())}."
        )
    return _presets()[preset]


def gpu(name: str, preset: str | None = None) -> Gpu:
    """GPU of that name or alias, with data sheet figures or as a paper prints them.

    Names of drivers, of the label nvidia.com/gpu.product and of SkyPilot are known, and machines of
    clouds stand for the GPU that they have.

    Parameters
    ----------
    preset
        Name of a paper (see :func:`presets`). What it prints replaces the data sheet's figures,
        mistakes included, so that its results can be reproduced with its own numbers; what it
        does not print stays. Inside a preset the paper's own name of the GPU is enough.

    Raises
    ------
    CatalogError
        If the name or the preset is unknown, with the nearest names.

    Examples
    --------
    >>> gpu("H100-SXM").fp16_tflops, gpu("H100-SXM", preset="helix").fp16_tflops
    (989.0, 1979.0)
    >>> gpu("A100")
    Traceback (most recent call last):
    hetero.errors.CatalogError: No GPU is called 'A100'. Resolve: use A100-SXM-80GB or \
A100-SXM-40GB or A100-PCIE-80GB or A100-PCIE-40GB.
    >>> [gpu(name).name for name in ("NVIDIA-H100-80GB-HBM3", "g5.12xlarge")]
    ['H100-SXM', 'A10G']
    """
    known = gpus(preset)
    if (found := known.get(str(name))) is not None:
        return found
    key = key_of(str(name)).removesuffix("shared")
    names = _other_names()
    other = names.get(key) or next(
        (gpu for one, gpu in names.items() if "*" in one and fnmatchcase(key, one)), ""
    )
    if other and (found := known.get(other)) is not None:
        return found
    if re.search(r"mig\d", key):
        raise CatalogError(
            f"'{name}' is a part of a GPU (MIG), of which there are no figures.",
            resolve="describe it under gpus: in the cluster file, or name whole GPUs.",
        )
    return known.find(name, lambda one: _like(key, one))


@lru_cache(maxsize=1)
def _names() -> dict[str, _Named]:
    from hetero.rows import read_records

    rows = read_records(paths.data("specs", "gpu_names.csv"), _Named)
    return {str(row["gpu"]): _Named(**row) for row in rows}  # type: ignore[arg-type]


def names_of(gpu: str) -> tuple[str, ...]:
    """What a driver calls a GPU of the catalog, then SkyPilot and clouds; none if unknown."""
    return _names()[gpu].names if gpu in _names() else ()


def skypilot_names() -> dict[str, str]:
    """Names of SkyPilot by GPU of the catalog; of GPUs that share one the most usual is first."""
    return {gpu: row.skypilot for gpu, row in _names().items() if row.skypilot}


@lru_cache(maxsize=1)
def _other_names() -> dict[str, str]:
    """GPUs by what drivers, labels of Kubernetes, SkyPilot and clouds call them or a machine."""
    return {key_of(one, "*"): gpu for gpu, row in _names().items() for one in row.names}


def _like(key: str, one: Gpu) -> bool:
    """Whether a GPU has the memory and the form that a name says."""
    said, own = re.search(r"(\d+)gi?b", key), key_of(one.name)
    forms = [form for form in ("pcie", "sxm", "nvl") if form in key]
    same = not forms or not any(f in own for f in ("pcie", "sxm", "nvl")) or forms[0] in own
    return same and (said is None or abs(int(said.group(1)) / one.mem_gib - 1) < _SAME_SIZE)
