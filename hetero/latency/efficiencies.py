"""The committed roofline efficiencies: which there are for a GPU, and how well they hold."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np
import pandas as pd

from hetero.catalog import Gpu, gpu, link
from hetero.errors import ParameterError
from hetero.latency import measured
from hetero.latency.calibration import PRIOR, accuracy, by_gpu, takes_part
from hetero.latency.frames import SOURCES, Source, derived_frame
from hetero.latency.roofline import VALUES, Efficiency

_DIGITS = 4


@lru_cache(maxsize=1)
def calibrated() -> pd.DataFrame:
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


def sources(name: str) -> tuple[str, ...]:
    """Calibrations that cover the chip of a GPU, newest first, as ``efficiency`` takes them."""
    frame = calibrated()
    rows = frame[frame["gpu"].map(chip) == chip(name)]
    labels = [
        f"{source}/{engine.split()[0]}" if source == "aiconfigurator" else str(source)
        for source, engine in zip(rows["source"], rows["engine"], strict=True)
    ]
    # Among engines of the same age vLLM comes first: it is what most of the papers ran.
    order = ("aiconfigurator/vllm", "aiconfigurator", "splitwise", "helix", "profiles")
    return tuple(sorted(labels, key=lambda label: [not label.startswith(start) for start in order]))


def efficiency(gpu: Gpu, source: str | None = None) -> Efficiency:
    """Efficiencies of a GPU.

    Parameters
    ----------
    source
        ``splitwise``, ``helix``, ``profiles`` or ``aiconfigurator/ENGINE``; by default the first of
        :func:`sources`. ``median`` takes the median of every value over the calibrations of all
        GPUs, as is done for GPUs that nothing was measured on.

    Values that the source says nothing about are carried over as medians over the chips that
    determined them, of the same source if there are any, the link's over the same kind of link;
    they stay listed as estimated. With no such chip the centre of the prior is taken.
    Another variant of a measured chip (another memory, another link) takes the chip's values and
    is ``estimated`` as a whole.

    Raises
    ------
    ParameterError
        If the source does not cover the chip.
    """
    frame = calibrated()
    known = sources(gpu.name)
    if source is not None and source != "median" and source not in known:
        raise ParameterError(
            f"There is no calibration '{source}' for {gpu.name}.",
            resolve=f"use {', '.join((*known, 'median'))}, or leave the source out.",
        )
    if source == "median" or not known:
        return Efficiency.of(
            _medians(gpu.link_type).values(),
            estimated=VALUES,
            source="medians over all calibrated GPUs",
            provenance="estimated",
        )
    wanted, _, engine = (source or known[0]).partition("/")
    rows = frame[
        (frame["gpu"].map(chip) == chip(gpu.name))
        & (frame["source"] == wanted)
        & frame["engine"].str.startswith(engine)
    ]
    exact = rows["gpu"] == gpu.name
    row = (rows[exact] if exact.any() else rows).iloc[0]
    medians = _medians(gpu.link_type, wanted)
    carried = set(row["unmeasured"])
    if _kind(gpu.link_type) != _kind(_link_of(row["gpu"])):
        carried |= {"link_efficiency", "hop_latency_s"}
    loose = tuple(name for name in VALUES if name in carried or name in row["estimated"])
    return Efficiency.of(
        (medians[name] if name in carried else row[name] for name in VALUES),
        estimated=loose,
        source=f"calibrated on {row['source']} ({row['engine']}, {row['gpu']})",
        provenance="derived" if row["gpu"] == gpu.name else "estimated",
    )


def _link_of(name: str) -> str:
    return gpu(name).link_type


def _kind(link_type: str) -> str:
    return link(link_type).kind


def lenders() -> pd.DataFrame:
    """Calibrations that lend values to other chips: those on whole replicas of several models.

    A layer profile has one model or two on one GPU or two, which does not tell efficiencies from
    overheads: its values hold together, for the chip that it was made on.
    """
    frame = calibrated()
    return frame[frame["source"] != "profiles"]


@lru_cache(maxsize=64)
def _medians(link_type: str, source: str = "") -> dict[str, float]:
    frame = lenders()
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


def errors(*, raw: Collection[Source] = ()) -> pd.DataFrame:
    """Error of the calibrated roofline on every measured table, per GPU, engine and phase.

    Columns: source, gpu, engine, scope (``fitted``, or ``not fitted`` for tables left out), phase,
    rows, mape_percent, bias_percent, p95_percent, max_percent, and the held-out mean errors
    held_out_llm_percent and held_out_degree_percent as committed.

    Parameters
    ----------
    raw
        Sources whose published files are used; for the others the derived reductions are.
    """
    committed = {
        (row["source"], row["gpu"], row["engine"]): row for row in calibrated().to_dict("records")
    }
    found = []
    for source in SOURCES:
        groups = by_gpu(measured.tables(source, raw=source in raw))
        for (name, engine), tables in groups.items():
            row = committed[source, name, engine]
            values = Efficiency.of(row[value] for value in VALUES)
            for scope in ("fitted", "not fitted"):
                chosen = [t for t in tables if takes_part(t) == (scope == "fitted")]
                for phase, a in accuracy(chosen, values).items() if chosen else ():
                    held = {
                        f"held_out_{kind}_percent": row[f"{phase}_held_out_{kind}_mape_percent"]
                        if scope == "fitted"
                        else np.nan
                        for kind in ("llm", "degree")
                    }
                    found.append(
                        {
                            "source": source,
                            "gpu": name,
                            "engine": engine,
                            "scope": scope,
                            "phase": phase,
                            "rows": a.rows,
                            "mape_percent": a.mape_percent,
                            "bias_percent": a.bias_percent,
                            "p95_percent": a.p95_percent,
                            "max_percent": a.max_percent,
                            **held,
                        }
                    )
    return pd.DataFrame(found)
