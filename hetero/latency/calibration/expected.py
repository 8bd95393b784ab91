r"""What error to expect of a step time, by how much is known about its GPU.

Every GPU of the catalog gets its times from one of four kinds of source:

``measured``
    The GPU was measured with this model: times are read off; what errs is the reduction.
``calibrated``
    Its efficiencies were fitted to other models on it, see
    :mod:`hetero.latency.calibration.roofline_fit`.
``same chip``
    Another variant of its chip was calibrated (other memory, link or power).
``carried``
    Nothing was measured on its chip: each efficiency is the median over the calibrated chips.

Errors are ``ln(predicted / measured)`` of held-out steps. Of ``calibrated`` each model is left out
of the fit in turn; of ``carried`` each chip. A table's mean error is common to all steps of a
replica and moves a plan; the rest averages out over a run:

.. math:: e_{ij} = b_i + w_{ij}, \quad sd_b^2 = mean\,b_i^2, \quad sd_w^2 = mean\,w_{ij}^2

for table ``i`` and step ``j``, means taken over the tables of a chip and then over chips, so that
each chip has one voice however often it was measured. What was held out is committed,
``data/measured/held_out.csv``. A measured table is not wrong about itself; its common part is how
far three engines of one generation lie apart on the same replica.

Servers err more than tables: the engine takes time between its operators, and before the first
token. Runs of servers that no fit knew (``data/measured/servers_held_out.csv``, made by
:mod:`pipelines.studies.server_intervals`) say by how much their steps erred, ``u``, and their TTFT,
``v``. The engine's part ``e`` is common to both phases, that of the time per request is ``f``:

.. math:: P\big(|u| \le \tfrac{z^2}{w}\sqrt{sd_b^2 + e^2}\big) = 0.9, \quad
          P\big(|v| \le \tfrac{z^2}{w}\sqrt{k^2 sd^2 + s^2 f^2}\big) = 0.9, \quad
          sd = \sqrt{sd_b^2 + e^2}, \quad w = t_{n,0.95}

with ``z`` the normal quantile of 95 %, ``w`` that of Student's t with as many degrees of freedom as
chips (of a GPU that was not measured) or models (of one that was, as other makers' were on servers)
show the error, ``sd_b`` of decode steps in the first and of prefill steps in the second, ``k`` what
TTFT grows by with the steps, and ``s`` the share of the time per request in it; each pair of GPU
and model has one weight. Both are known by kind of source and engine, on NVIDIA's GPUs and on
others. Where fewer than two GPUs show them, those of all kinds count, then of all engines, and
:attr:`StepError.servers` says so.

Mixtures of experts err by what their own runs (``data/measured/expert_servers.csv``) do. These are
of few pairs of GPU and model, beside which dense models count as one pair more:

.. math:: sd_b^2 + e^2 = \frac{1}{n + 1} \Big(sd_b^2 + e_{dense}^2 + \sum_i mean_j\,u_{ij}^2\Big)

where ``w`` of dense models is ``z``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from hetero.arrays import Floats
from hetero.catalog import gpu as find_gpu
from hetero.catalog import link
from hetero.errors import ParameterError
from hetero.grouping import grouped
from hetero.latency.calibration import roofline_fit
from hetero.latency.frames import derived_frame
from hetero.latency.models.efficiencies import PARTS, chip, fitted_frame, sources
from hetero.latency.sources import measured
from hetero.latency.tables import PHASES, Phase

Fold: TypeAlias = Literal["gpu", "llm"]
LeftOut: TypeAlias = tuple[Fold, str] | None
Level = Literal["measured", "calibrated", "same chip", "carried"]
LEVELS: tuple[Level, ...] = ("measured", "calibrated", "same chip", "carried")

_Z = 1.6449  # nine of ten lie within
_LEAST_GPUS = 2
_POINTS = (np.arange(40) + 0.5) / 40  # of the distribution of each table's errors that is kept


@dataclass(frozen=True, slots=True)
class StepError:
    """Expected error of the step times of a replica, as deviations of the logarithm.

    Attributes
    ----------
    prefill_sd, decode_sd
        Common to all steps of a replica: what moves a plan.
    correlation
        Between both.
    prefill_scatter, decode_scatter
        Of single steps around that.
    prefill_p90_percent, decode_p90_percent
        Nine of ten steps err by less [%]: those of tables held out, and the engine's part.
    engine_sd
        Part of both common deviations that is the engine's and not the tables'.
    front_sd
        Of the time that the engine takes per request.
    servers
        Whose runs both are from, in words.
    level
        Kind of source that it holds for.
    """

    level: Level
    prefill_sd: float
    decode_sd: float
    correlation: float
    prefill_scatter: float
    decode_scatter: float
    prefill_p90_percent: float
    decode_p90_percent: float
    rows: int
    engine_sd: float = 0.0
    front_sd: float = 0.0
    servers: str = ""


@cache
def level_of(
    name: str, llm: str | None = None, tensor_parallel: int = 1, *, parts: bool = False
) -> Level:
    """Kind of the best source there is for a GPU, and for a model on it.

    Several GPUs over a link that no calibration on their chip determined count as carried, and as
    the same chip where that was fitted to other hosts' runs.
    ``parts`` counts calibrations that do not hold for all its replicas.

    Examples
    --------
    >>> level_of("A100-SXM-80GB", "Llama-3.1-8B"), level_of("A100-SXM-80GB", "LLaMA-1-13B")
    ('measured', 'calibrated')
    >>> level_of("H800-SXM"), level_of("RTX-A5000")
    ('same chip', 'carried')
    >>> level_of("A10G"), level_of("A10G", tensor_parallel=2)
    ('calibrated', 'carried')
    """
    if llm is not None and (name, llm) in _measured_pairs():
        return "measured"
    if name in set(fitted_frame().loc[lambda rows: parts | ~rows["grid"].isin(PARTS), "gpu"]):
        if tensor_parallel == 1 or _link_known(name):
            return "calibrated"
        return "same chip" if "several" in sources(name, parts=True) else "carried"
    return "same chip" if sources(name, parts=parts) else "carried"


@lru_cache(maxsize=256)
def _link_known(name: str) -> bool:
    """Whether some calibration on the chip determined its kind of link, if with other values."""
    frame = fitted_frame()
    kind = link(find_gpu(name).link_type).kind
    return any(
        chip(row["gpu"]) == chip(name)
        and link(find_gpu(row["gpu"]).link_type).kind == kind
        and "link_efficiency" not in row["unmeasured"]
        and ("link_efficiency" not in row["estimated"] or row["source"] == "servers")
        and row["grid"] != "several"
        for row in frame.to_dict("records")
    )


@lru_cache(maxsize=1)
def _measured_pairs() -> frozenset[tuple[str, str]]:
    names = ("aiconfigurator_steps", "profile_steps", "splitwise_medians")
    frames = [derived_frame(name)[["gpu", "llm"]] for name in names]
    return frozenset(pd.concat(frames).itertuples(index=False, name=None))


def level_named(name: str) -> Level:
    """The level of that name."""
    if name not in LEVELS:
        raise ParameterError(
            f"'{name}' is no kind of source.", resolve=f"use one of {', '.join(LEVELS)}."
        )
    return name


def expected_error(name: str, llm: str | None = None) -> StepError:
    """Expected error of the best source there is for a GPU, and for a model on it.

    The variant of a measured chip takes the error of ``carried`` sources: no chip was measured in
    two variants under one engine, so that nothing says how much smaller it is.

    Raises
    ------
    CatalogError
        If there is no such GPU.
    """
    gpu = find_gpu(name)
    return error_of(level_of(gpu.name, llm), vendor=gpu.vendor)


@lru_cache(maxsize=256)
def error_of(
    level: Level,
    engine: str = "vllm",
    vendor: str = "NVIDIA",
    *,
    without: LeftOut = None,
    experts: bool = False,
) -> StepError:
    """Expected error of a kind of source, over all tables and runs of servers held out that way.

    Parameters
    ----------
    engine, vendor
        Engine that serves, ``"any"`` as vLLM, and maker of the GPU.
    without
        A ``gpu``, with all variants of its chip, or an ``llm`` that takes no part.
    experts
        Of a mixture of experts.

    Examples
    --------
    >>> ours, other = error_of("calibrated"), error_of("calibrated", "trtllm")
    >>> ours.engine_sd < other.engine_sd < error_of("carried", vendor="AMD").engine_sd
    True
    """
    tables = _of_tables(level_named(level), without)
    engine = "vllm" if engine == "any" else engine
    part, said = _engine_part(level, engine, vendor, without, experts)
    nearer = LEVELS[: LEVELS.index(level)]
    # Servers show decode steps. In prefill the engine errs no less than beside nearer sources.
    most = max([part, *(_engine_part(one, engine, vendor, without, experts)[0] for one in nearer)])
    found = replace(
        tables,
        prefill_sd=float(np.hypot(tables.prefill_sd, most)),
        decode_sd=float(np.hypot(tables.decode_sd, part)),
        prefill_p90_percent=_with_part(tables.prefill_p90_percent, most),
        decode_p90_percent=_with_part(tables.decode_p90_percent, part),
        engine_sd=part,
        front_sd=_front_part(level, engine, vendor, without),
        servers=said,
    )
    both = tables.correlation * tables.prefill_sd * tables.decode_sd + part * most
    return replace(found, correlation=both / (found.prefill_sd * found.decode_sd))


def _with_part(p90_percent: float, part: float) -> float:
    return 100.0 * float(np.expm1(np.hypot(np.log1p(p90_percent / 100.0), _Z * part)))


@lru_cache(maxsize=256)
def _engine_part(
    level: Level, engine: str, vendor: str, without: LeftOut, experts: bool
) -> tuple[float, str]:
    """What steps err by beyond their tables, and on whose runs."""
    runs, said = _runs_of(engine, vendor, without, level)
    known = {one: _of_tables(one, without).decode_sd for one in LEVELS}
    own = _mixtures(engine, vendor, without) if experts else pd.Series(dtype=float)
    wide = 1.0 if len(own) else _few(runs, level, vendor, without)
    beyond = (wide * runs["step"] / _Z) ** 2 - runs["level"].map(known) ** 2
    part = max(0.0, _of_pairs(runs, beyond))
    if len(own):
        part = max(0.0, (part - len(own) * known[level] ** 2 + own.sum()) / (1 + len(own)))
        said = f"{said}, and mixtures of experts"
    return float(part**0.5), said


@lru_cache(maxsize=256)
def _front_part(level: Level, engine: str, vendor: str, without: LeftOut) -> float:
    """What the time per request errs by, where TTFT shows it."""
    runs, _ = _runs_of(engine, vendor, without, shows="ttft_per_step")
    tables = {one: _of_tables(one, without) for one in LEVELS}
    apart = {name: np.hypot(one.prefill_sd, one.decode_sd) for name, one in tables.items()}
    wide = _few(runs, level, vendor, without)
    left = wide * (runs["TTFT"] + runs["ttft_per_step"] * runs["step"])
    steps = runs["ttft_per_step"] * runs["level"].map(apart)
    beyond = ((left / _Z) ** 2 - steps**2) / runs["request_share"] ** 2
    return float(max(0.0, _of_pairs(runs, beyond)) ** 0.5)


def _few(rows: pd.DataFrame, level: Level, vendor: str, without: LeftOut) -> float:
    """By how much a quantile over few chips, or models, is wider than a normal one."""
    unseen = level in ("same chip", "carried") and vendor in ("", "NVIDIA")
    fold = without[0] if without else "gpu" if unseen else "llm"
    names = rows["gpu"].map(chip) if fold == "gpu" else rows["llm"]
    return float(stdtrit(names.nunique(), 0.95)) / _Z


def _mixtures(engine: str, vendor: str, without: LeftOut) -> pd.Series[float]:
    """Mean squares of what steps of mixtures erred by, of each pair of GPU and model."""
    rows = derived_frame("expert_servers")
    rows = rows[rows["TPOT"].notna() & (rows["server"].str.split().str[0] == engine)]
    rows = rows[rows["gpu"].map(lambda name: find_gpu(name).vendor) == (vendor or "NVIDIA")]
    tests = rows["test"] != "default"
    if without is not None:
        tests = (rows["test"] == without[0]) & ~_is(rows, *without)
    squares = np.log1p(rows[tests]["TPOT"] / 100.0) ** 2
    means: pd.Series[float] = squares.groupby([rows["gpu"], rows["llm"]]).mean().dropna()
    return means


def _runs_of(
    engine: str,
    vendor: str,
    without: LeftOut,
    level: Level | None = None,
    *,
    shows: str = "step",
) -> tuple[pd.DataFrame, str]:
    """Runs of servers that tell an engine's error, and whose they are."""
    rows = servers_held_out_frame()
    rows = rows[rows[shows].notna()]
    usual = vendor in ("", "NVIDIA")
    nvidia = rows["gpu"].map(lambda name: find_gpu(name).vendor == "NVIDIA")
    if without is not None:
        # What fits without one GPU (or model) got wrong of all others.
        rows = rows[~_is(rows, *without) & rows["test"].isin([without[0], "unfitted"])]
    near = rows[nvidia.loc[rows.index] == usual]
    where = "NVIDIA's GPUs" if usual else "other makers' GPUs"
    own = near[near["engine"] == engine]
    fitted = own[own["test"] != "unfitted"]
    for found, said in (
        (fitted[fitted["level"] == level], f"{engine} on {where}, {level}"),
        (near[(near["level"] == level) & (not usual)], f"all engines on {where}, {level}"),
        (fitted, f"{engine} on {where}"),
        (own, f"{engine} on {where}, never fitted"),
        (near, f"all engines on {where}"),
    ):
        if found["gpu"].nunique() >= _LEAST_GPUS:
            return found, said
    return (near, f"all engines on {where}") if len(near) else (rows, "all engines and GPUs")


def _is(rows: pd.DataFrame, fold: Fold, name: str) -> pd.Series[bool]:
    return rows["llm"] == name if fold == "llm" else rows["gpu"].map(chip) == chip(name)


def _of_pairs(rows: pd.DataFrame, values: pd.Series[float]) -> float:
    """What nine of ten runs stay below, each pair of GPU and model of one weight."""
    weight = 1.0 / rows.groupby(["source", "gpu", "llm", "degree"])["gpu"].transform("size")
    order = np.argsort(values.to_numpy())
    weights = weight.to_numpy()[order]
    position = np.cumsum(weights) - weights / 2
    return float(np.interp(0.9 * weights.sum(), position, values.to_numpy()[order]))


@lru_cache(maxsize=64)
def _of_tables(level: Level, without: LeftOut = None) -> StepError:
    """The part of the error that tables show."""
    if level == "measured":
        return _between_engines()
    frame = held_out_frame()
    frame = frame[frame["level"] == ("carried" if level == "same chip" else level)]
    if without is not None:
        frame = frame[~_is(frame, *without)]
    per = {phase: frame[frame["phase"] == phase] for phase in PHASES}
    both = per["prefill"].merge(
        per["decode"], on=["source", "gpu", "engine", "llm", "degree"], suffixes=("_p", "_d")
    )
    p, d = both["mean_p"], both["mean_d"]
    sd = {phase: _mean(rows, rows["mean"] ** 2) ** 0.5 for phase, rows in per.items()}
    scatter = {phase: _mean(rows, rows["scatter"] ** 2) ** 0.5 for phase, rows in per.items()}
    p90 = {phase: quantile(rows, np.abs(points_of(rows)), 0.9) for phase, rows in per.items()}
    return _step_error(level, (both, p, d), sd, scatter, p90, int(frame["rows"].sum()))


def _step_error(
    level: Level,
    paired: tuple[pd.DataFrame, pd.Series[float], pd.Series[float]],
    sd: dict[Phase, float],
    scatter: dict[Phase, float],
    p90: dict[Phase, float],
    rows: int,
) -> StepError:
    both, p, d = paired
    return StepError(
        level=level,
        prefill_sd=sd["prefill"],
        decode_sd=sd["decode"],
        correlation=_mean(both, p * d) / (_mean(both, p**2) * _mean(both, d**2)) ** 0.5,
        prefill_scatter=scatter["prefill"],
        decode_scatter=scatter["decode"],
        prefill_p90_percent=100.0 * float(np.expm1(p90["prefill"])),
        decode_p90_percent=100.0 * float(np.expm1(p90["decode"])),
        rows=rows,
    )


@lru_cache(maxsize=1)
def _between_engines() -> StepError:
    """What the choice among three engines of one generation changes, and the reduction's error."""
    replicas = grouped(
        ((table.gpu, table.llm, table.tensor_parallel), table)
        for table in measured.aiconfigurator()
        if roofline_fit.takes_part(table)
    )
    rows = []
    for tables in replicas.values():
        decode = tables[0].decode
        if len(tables) < 2 or any(len(t.decode) != len(decode) for t in tables):
            continue
        logs = np.log([t.seconds for t in tables])
        error = logs - logs.mean(axis=0)
        rows += [
            (tables[0].gpu, own[~decode].mean(), own[decode].mean(), own[~decode], own[decode])
            for own in error
        ]
    frame = pd.DataFrame(rows, columns=["gpu", "p", "d", "prefill", "decode"])
    p, d = frame["p"], frame["d"]
    steps = {phase: np.concatenate(frame[phase].to_list()) for phase in PHASES}
    reduced = derived_frame("aiconfigurator_steps")
    # A mean absolute error m of normal errors is a deviation of 1.25 m.
    scatter = {
        phase: 0.0125 * float((reduced[f"{phase}_mean_error_percent"] ** 2).mean() ** 0.5)
        for phase in PHASES
    }
    p90 = {phase: float(np.quantile(np.abs(values), 0.9)) for phase, values in steps.items()}
    sd: dict[Phase, float] = {
        "prefill": _mean(frame, p**2) ** 0.5,
        "decode": _mean(frame, d**2) ** 0.5,
    }
    return _step_error("measured", (frame, p, d), sd, scatter, p90, sum(map(len, steps.values())))


@lru_cache(maxsize=1)
def held_out_frame() -> pd.DataFrame:
    """Errors of held-out tables, one row per table and phase, as committed."""
    return derived_frame("held_out")


@lru_cache(maxsize=1)
def servers_held_out_frame() -> pd.DataFrame:
    """Errors of runs of servers that took no part in a fit, as committed."""
    return derived_frame("servers_held_out")


def _mean(rows: pd.DataFrame, values: pd.Series[float]) -> float:
    """Mean over the tables of each chip, then over chips."""
    return float(values.groupby(rows["gpu"].map(chip)).mean().mean())


def points_of(rows: pd.DataFrame) -> Floats:
    """Points of the distribution of each table's errors; shape (tables, 40)."""
    return np.array([text.split() for text in rows["points"]], dtype=np.float64)


def quantile(rows: pd.DataFrame, points: Floats, q: float) -> float:
    """Quantile over all steps of the tables, each chip with the same weight."""
    share = rows["rows"] / rows["rows"].groupby(rows["gpu"].map(chip)).transform("sum")
    weight = np.repeat(share.to_numpy() / points.shape[1], points.shape[1])
    order = np.argsort(points.ravel())
    position = np.cumsum(weight[order]) - weight[order] / 2
    return float(np.interp(q * weight.sum(), position, points.ravel()[order]))
