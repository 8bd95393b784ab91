"""The committed roofline efficiencies: which there are for a GPU, and how well they hold."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hetero.catalog import Gpu, Llm, gpu, link
from hetero.errors import ParameterError
from hetero.latency.frames import derived_frame
from hetero.latency.models.roofline import VALUES, Efficiency, ExpertEfficiency, Roofline

if TYPE_CHECKING:
    import pandas as pd

# Centre, standard deviation of the logarithm, and bounds of each value before any measurement.
# Centres are round numbers near the middle of what the operator tables give on six GPUs.
PRIOR: dict[str, tuple[float, float, float, float]] = {
    "compute_efficiency": (0.65, 0.5, 0.02, 1.0),
    "bandwidth_efficiency": (0.80, 0.3, 0.02, 1.0),
    "kv_efficiency": (0.75, 0.5, 0.02, 1.0),
    "attention_efficiency": (0.45, 0.5, 0.01, 1.0),
    "link_efficiency": (0.45, 0.7, 0.005, 1.0),
    "padding_tokens": (64.0, 1.0, 0.1, 1024.0),
    "layer_overhead_s": (30e-6, 1.0, 1e-7, 1e-2),
    "step_overhead_s": (300e-6, 1.0, 1e-6, 1e-1),
    "hop_latency_s": (2e-6, 1.0, 1e-8, 1e-3),
}
_DIGITS = 4
PARTS = ("release", "several")
"""Grids of the calibrations that hold for one generation of an engine, or several GPUs, alone."""

# Over PCIe their all-reduces go through the host's memory: GeForce cards have no access to each
# other's, nor have the T4 and L4 of clouds, which were measured in twos and fours.
_STAGED = ("RTX-3090", "RTX-3090Ti", "RTX-4090", "RTX-5090", "T4", "L4")
_MEMORY = ("bandwidth_efficiency", "kv_efficiency")
# Chips of one die with another memory or more power.
_DIES = {"H200": "H100", "MI325X": "MI300X", "MI308X": "MI300X", "MI350X": "MI355X"}


@lru_cache(maxsize=1)
def fitted_frame() -> pd.DataFrame:
    """The committed calibrations, ``data/measured/efficiencies.csv``."""
    frame = derived_frame("efficiencies")
    return frame.assign(**{c: frame[c].fillna("").str.split() for c in ("estimated", "unmeasured")})


def chip(name: str) -> str:
    """Chip of a GPU, the part of its name that its variants share.

    Examples
    --------
    >>> chip("A100-SXM-80GB"), chip("V100-SXM2-32GB"), chip("RTX-PRO-6000-Server")
    ('A100', 'V100', 'RTX-PRO-6000')
    >>> chip("RTX-4090"), chip("RTX-A6000"), chip("RTX-6000-Ada")
    ('RTX-4090', 'RTX-A6000', 'RTX-6000-Ada')
    """
    # Cut-down links do not change the chip: an A800 computes as an A100, an H800 as an H100.
    if name.startswith("RTX-PRO-6000"):
        return "RTX-PRO-6000"
    if name.startswith("RTX-"):  # the number says which chip it is
        return name
    first = name.split("-")[0]
    return {"A800": "A100", "H800": "H100", "GH200": "H100"}.get(first, first)


@lru_cache(maxsize=256)
def sources(name: str, without: str = "", *, parts: bool = False) -> tuple[str, ...]:
    """Calibrations that cover the chip of a GPU, newest first, as ``efficiency`` takes them.

    With ``parts`` also those that hold for one generation of an engine, or several GPUs, alone.
    """
    rows = _of_chip(name, without, parts=parts)
    labels = [
        f"{source}/{engine.split()[0]}"
        if source == "aiconfigurator"
        else f"{source}/{engine}"
        if grid == "release"
        else str(source)
        for source, engine, grid in rows[["source", "engine", "grid"]].itertuples(index=False)
    ]
    # Among engines of the same age vLLM comes first: it is what most of the papers ran.
    order = ("aiconfigurator/vllm", "aiconfigurator", "splitwise", "helix", "profiles")
    return tuple(sorted(labels, key=lambda label: [not label.startswith(start) for start in order]))


def _of_chip(name: str, without: str = "", *, parts: bool = False) -> pd.DataFrame:
    """Rows of the chip of a GPU, else of its die; those of ``without`` do not count."""
    frame = fitted_frame()
    frame = frame[(frame["gpu"] != without) & (parts | ~frame["grid"].isin(PARTS))]
    rows = frame[frame["gpu"].map(chip) == chip(name)]
    return rows if len(rows) else frame[frame["gpu"].map(die) == die(name)]


def die(name: str) -> str:
    """Die of a GPU: chips of one die differ in memory or power."""
    own = chip(name)
    return _DIES.get(own, own)


@lru_cache(maxsize=256)
def efficiency(gpu: Gpu, source: str | None = None, *, without: str = "") -> Efficiency:
    """Efficiencies of a GPU.

    Parameters
    ----------
    source
        ``splitwise``, ``helix``, ``profiles``, ``servers`` or ``aiconfigurator/ENGINE``, or one of
        the ``parts`` of :func:`sources`; by default the first of the others. ``median`` takes the
        median of every value over the calibrations of all GPUs, as is done for GPUs that nothing
        was measured on.
    without
        GPU whose measurements do not count, to see what is said of it without them.

    Values that the source says nothing about are carried over as medians over the chips that
    determined them, of the same source if there are any, the link's over the same kind of link;
    they stay listed as estimated. With no such chip the centre of the prior is taken. Among GPUs
    without access to each other's memory a link has the bandwidth [bytes/s] of those that were
    measured so, and the latency of its kind: the host is what limits it. GPUs of a vendor whose
    kernels were measured in offline runs alone (``offline_compute.csv``) have their share of peak
    compute, or the median of the vendor's.
    Another variant of a measured chip (another memory, another link) takes the chip's values and
    is ``estimated`` as a whole.
    """
    known = sources(gpu.name, without)
    every = sources(gpu.name, without, parts=True)
    if source is not None and source not in (*every, "median"):
        raise ParameterError(
            f"There is no calibration '{source}' for {gpu.name}.",
            resolve=f"use {', '.join((*every, 'median'))}, or leave the source out.",
        )
    if source == "median" or not (source or known):
        values, label = _lent(gpu, without=without), "medians over all calibrated GPUs"
        if share := _offline_compute(gpu, without):
            values["compute_efficiency"] = share
            label += f", compute of offline runs of {gpu.vendor}"
        return Efficiency.of(
            values.values(), estimated=VALUES, source=label, provenance="estimated"
        )
    wanted, _, engine = (source or known[0]).partition("/")
    rows = _of_chip(gpu.name, without, parts=True)
    rows = rows[(rows["source"] == wanted) & rows["engine"].str.startswith(engine)]
    exact = rows["gpu"] == gpu.name
    row = (rows[exact] if exact.any() else rows).iloc[0]
    medians = _lent(gpu, wanted, without)
    borrowed = set(row["unmeasured"])
    if _kind(gpu.link_type) != _kind(_link_of(row["gpu"])):
        borrowed |= {"link_efficiency", "hop_latency_s"}
    values = dict(row[list(VALUES)]) | {name: medians[name] for name in borrowed}
    own = fitted_frame()[fitted_frame()["gpu"] == gpu.name]
    if source is None and without != gpu.name and not exact.any() and len(own):
        # Variants differ in their memory: an older calibration of this very one knows it.
        for name in _MEMORY:
            if name not in own.iloc[0]["estimated"]:
                values[name] = own.iloc[0][name]
    return Efficiency.of(
        values.values(),
        estimated=tuple(name for name in VALUES if name in borrowed or name in row["estimated"]),
        source=f"calibrated on {row['source']} ({row['engine']}, {row['gpu']})",
        provenance="derived" if row["gpu"] == gpu.name else "estimated",
    )


def _lent(gpu: Gpu, source: str = "", without: str = "") -> dict[str, float]:
    """What others lend to a GPU."""
    values = dict(_medians(gpu.link_type, source, without))
    if chip(gpu.name) in _STAGED and _kind(gpu.link_type) == "pcie":
        values["link_efficiency"] = _staged_gbs(without) / gpu.link_gbs
        values["hop_latency_s"] = link(gpu.link_type).latency_s
    return values


@lru_cache(maxsize=8)
def _staged_gbs(without: str) -> float:
    """Bandwidth [GB/s] of all-reduces through the host's memory: T4 and L4 reach one, 4.0."""
    frame = chips_frame()
    measured = np.array(["link_efficiency" not in names for names in frame["estimated"]])
    rows = frame[measured & frame["gpu"].map(chip).isin(_STAGED) & (frame["gpu"] != without)]
    reached = rows["link_efficiency"] * rows["gpu"].map(lambda name: gpu(name).link_gbs)
    return float(reached.median())


def _offline_compute(of: Gpu, without: str) -> float | None:
    """Share of peak compute that offline runs show of a GPU, or of others of its vendor.

    Of its die first: a clock that power limits goes with its third root, as voltage goes with it.
    """
    frame = derived_frame("offline_compute")
    frame = frame[(frame["vendor"] == of.vendor) & (frame["gpu"] != without)]
    if (own := frame[frame["gpu"] == of.name]).empty and not (
        own := frame[frame["gpu"].map(die) == die(of.name)]
    ).empty:
        clock = [min(1.0, (_watts(of) / _watts(gpu(name))) ** (1 / 3)) for name in own["gpu"]]
        return float((own["compute_efficiency"] * clock).median())
    shares = (frame if own.empty else own)["compute_efficiency"]
    return float(shares.median()) if len(shares) else None


def _watts(of: Gpu) -> float:
    """Power per peak compute [W/TFLOPS]; without bound where it is not known."""
    return math.inf if of.tdp_w is None else of.tdp_w / of.fp16_tflops


def _link_of(name: str) -> str:
    return gpu(name).link_type


def _kind(link_type: str) -> str:
    return link(link_type).kind


def chips_frame() -> pd.DataFrame:
    """Calibrations that lend values to other chips: those on whole replicas of several models.

    A layer profile has one model or two on one GPU or two, which does not tell efficiencies from
    overheads: its values hold together, for the chip that it was made on. Blackwell speaks through
    B200 alone.
    """
    frame = fitted_frame()
    return frame[(frame["grid"] == "published") & (frame["source"] != "profiles")]


@lru_cache(maxsize=64)
def _medians(link_type: str, source: str = "", without: str = "") -> dict[str, float]:
    frame = chips_frame()
    frame = frame[frame["gpu"] != without]
    chips, kinds = frame["gpu"].map(chip), frame["gpu"].map(_link_of).map(_kind)
    found = {}
    for name in VALUES:
        known = np.array([name not in names for names in frame["estimated"]])
        preferred = [np.asarray(frame["source"] == source)]
        if name in ("link_efficiency", "hop_latency_s"):
            preferred.insert(0, np.asarray(kinds == _kind(link_type)))
        for wish in preferred:
            known = known & wish if (known & wish).any() else known
        # One voice per chip, however many engines it was measured under.
        each = frame[name][known].groupby(chips[known]).median()
        found[name] = float(f"{each.median():.{_DIGITS}g}") if len(each) else PRIOR[name][0]
    return found


@lru_cache(maxsize=256)
def expert_efficiency(
    llm: Llm, gpu: Gpu, engine: str = "vllm", precision: str = "fp16", *, without: str = ""
) -> ExpertEfficiency:
    """What routed experts reach on a GPU under an engine (``experts.csv``).

    Experts in a narrower type than the rest, and each type of weights, have rows of their own. The
    nearest row counts: of the GPU, its chip or die, else the medians of its vendor; under the
    engine, else under vLLM; else vLLM's on NVIDIA's. ``without`` is as of :func:`efficiency`.
    """
    frame = derived_frame("experts")
    frame = frame[frame["gpu"] != without]
    wanted = "mxfp4" if llm.expert_bits else precision
    typed = frame[frame["type"] == (wanted if wanted in set(frame["type"]) else "fp16")]
    vendor = frame[frame["vendor"] == gpu.vendor]
    groups = (
        rows[rows["engine"] == name]
        for rows in (typed[typed["vendor"] == gpu.vendor], vendor, typed)
        for name in (engine, "vllm")
    )
    rows = next(found for found in groups if len(found))
    own = (rows[rows["gpu"].map(of) == of(gpu.name)] for of in (str, chip, die))
    row = next((found for found in own if len(found)), rows).median(numeric_only=True)
    return ExpertEfficiency(
        compute_share=float(row["compute_share"]),
        bandwidth_share=float(row["bandwidth_share"]),
        layer_s=1e-6 * float(row["layer_us"] + llm.latent * row["latent_us"]),
    )


def for_gpu(
    gpu: Gpu,
    llm: Llm,
    tensor_parallel: int = 1,
    *,
    source: str | None = None,
    precision: str = "fp16",
    kv_precision: str = "fp16",
    layers: int | None = None,
    without: str = "",
    experts: ExpertEfficiency | None = None,
    expert_ranks: int = 0,
) -> Roofline:
    """Roofline of a replica with calibrated efficiencies.

    Parameters
    ----------
    source, without
        Measurements to take them from, see :func:`efficiency`; by
        default the newest of the same chip, else medians over the other GPUs (``estimated``).
    experts
        What routed experts reach, by default :func:`expert_efficiency` of vLLM.
    expert_ranks
        See :class:`~hetero.latency.models.roofline.Roofline`.
    """
    if experts is None:
        found = llm.experts and expert_efficiency(llm, gpu, "vllm", precision, without=without)
        experts = found or ExpertEfficiency()
    return Roofline(
        gpu=gpu,
        llm=llm,
        efficiency=efficiency(gpu, source, without=without),
        tensor_parallel=tensor_parallel,
        precision=precision,
        kv_precision=kv_precision,
        layers=layers,
        experts=experts,
        expert_ranks=expert_ranks,
    )
