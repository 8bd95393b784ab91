"""The data type of the weights as a choice of the planner.

A smaller type leaves more memory for KV cache and is read faster in every decode step; where the
matrix units compute in it at a rate that the catalog knows, prefills are faster too, else weights
are converted on the way and products run at the fp16 rate (:mod:`hetero.latency.models.roofline`).
A GPU takes part in a type that its matrix units compute in, after the data sheet of its catalog
row; kernels that only store a type on other GPUs are left out.

What a type does to the quality of the replies is not modelled, nor what it takes to quantise a
model. Not counted either: scales and zero points (a few percent of the bytes), and embeddings or
logits that a checkpoint may keep in 16 bits. Efficiencies were calibrated in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from hetero.apps.portfolio.case import Case
from hetero.apps.portfolio.entry import Entry, Planner
from hetero.apps.portfolio.planners import planner as named
from hetero.apps.portfolio.score import goodput
from hetero.catalog import Gpu
from hetero.catalog.precision import PRECISION_BITS, bytes_of
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.thunderserve.budget import part_of

PRECISIONS: Final = ("fp16", "fp8", "int8", "int4")
"""Types that are tried, the widest first."""

Support = Literal["computes", "stores", "none"]
"""How a GPU takes part in a type: its matrix units compute in it at a known rate; they do, but the
catalog has no rate, so that products count as fp16; or not at all."""


def support(gpu: Gpu, precision: str) -> Support:
    """What a GPU does with weights of a type, after the data sheet of its catalog row.

    Raises
    ------
    ParameterError
        If the type is unknown.

    Examples
    --------
    >>> from hetero.catalog import gpu
    >>> [support(gpu("L40S"), p) for p in ("fp16", "fp8", "int8", "int4")]
    ['computes', 'computes', 'stores', 'stores']
    >>> support(gpu("A40"), "fp8"), support(gpu("V100-SXM2-16GB"), "int8")
    ('none', 'none')
    """
    if precision not in PRECISION_BITS:
        raise ParameterError(
            f"No precision is called '{precision}'.",
            resolve=f"use one of {', '.join(PRECISION_BITS)}.",
        )
    if precision in gpu.rated:
        return "computes"
    return "stores" if precision in gpu.precisions else "none"


@dataclass(frozen=True, slots=True)
class Trial:
    """A case in one type.

    Attributes
    ----------
    entry
        The plan, None where there is none; ``reason`` then says why.
    goodput_rps
        Largest rate that it carries within the targets, mean over the seeds [requests/s].
    weight_gb
        Weights of one copy of the model [GB].
    kv_tokens
        Tokens that all KV caches of the plan hold; None for plans over a network.
    left_out
        GPU types that do not take part.
    """

    precision: str
    entry: Entry | None
    goodput_rps: float
    weight_gb: float
    kv_tokens: int | None
    left_out: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class PrecisionChoice(Shown):
    """A case in every type of weights, and the best."""

    case: Case
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The type of largest goodput, the widest of equals."""
        return max(self.trials, key=lambda one: one.goodput_rps)

    @property
    def best_case(self) -> Case:
        """The case in the best type."""
        return replace(self.case, precision=self.best.precision)

    def table(self) -> Table:
        """One row per type."""
        columns = (
            Column("weights in"),
            Column("weights", "GB"),
            Column("GPUs in use"),
            Column("KV caches", "tokens"),
            Column("goodput", "requests/s"),
            Column("price", "$/h"),
            Column("why not"),
        )
        rows = tuple(
            (
                one.precision,
                one.weight_gb,
                None
                if one.entry is None
                else ", ".join(f"{n} x {name}" for name, n in one.entry.gpus.items()),
                one.kv_tokens,
                None if one.entry is None else one.goodput_rps,
                None if one.entry is None else one.entry.usd_per_h,
                one.reason or None,
            )
            for one in self.trials
        )
        notes = [
            "The quality of replies is not modelled: whether a type is good enough must be "
            "measured with the model itself.",
            "Step times in types other than fp16 are derived from fp16 calibrations.",
        ]
        notes += [
            f"{one.precision}: without {', '.join(one.left_out)}, which "
            f"{'do' if len(one.left_out) > 1 else 'does'} not compute in it."
            for one in self.trials
            if one.left_out and one.entry is not None
        ]
        for one in self.trials:
            stored = [
                name
                for name, gpu in self.case.cluster.gpu_types.items()
                if one.entry is not None
                and name in one.entry.gpus
                and support(gpu, one.precision) != "computes"
            ]
            if stored:
                notes.append(
                    f"{one.precision}: products count as fp16 on {', '.join(stored)}, of which the "
                    "catalog has no rate in it."
                )
        return Table(
            f"{self.case.name}: {self.best.precision} carries most", columns, rows, tuple(notes)
        )


def choose_precision(
    case: Case,
    planner: Planner | None = None,
    *,
    precisions: Sequence[str] = PRECISIONS,
    seeds: Sequence[int] = (0,),
) -> PrecisionChoice:
    """Plan a case in every type of weights, and take that of the largest goodput.

    Parameters
    ----------
    planner
        By default Mélange.

    Raises
    ------
    ParameterError
        If a type is unknown, or none is given.
    InfeasibleError
        If no type has a plan; the text says why for each.

    Examples
    --------
    >>> from hetero import catalog, cluster, workload
    >>> from hetero.simulator import Slo
    >>> case = Case(
    ...     cluster.cluster("heteroserve-mix-l40s"),
    ...     catalog.llm("Llama-3-8B"),
    ...     workload.load("azure2023_conv").head(500),
    ...     5.0,
    ...     Slo(ttft_s=2.0, tpot_s=0.1),
    ... )
    >>> choose_precision(case, precisions=("fp16", "fp8")).best.precision
    'fp8'
    """
    if not precisions:
        raise ParameterError("No precision is given.", resolve="give one or more.")
    chosen = planner or named("Mélange")
    trials = tuple(
        _trial(replace(case, precision=one), chosen, seeds) for one in dict.fromkeys(precisions)
    )
    if all(one.entry is None for one in trials):
        raise InfeasibleError(
            "; ".join(f"{one.precision}: {one.reason}" for one in trials),
            resolve="use larger GPUs or relax the targets.",
        )
    return PrecisionChoice(case, trials)


def _trial(case: Case, planner: Planner, seeds: Sequence[int]) -> Trial:
    out = [
        name
        for name, gpu in case.cluster.gpu_types.items()
        if support(gpu, case.precision) == "none"
    ]
    weight_gb = bytes_of(case.llm.params, case.precision) / 1e9
    left = [machine for machine in case.cluster.machines if machine.gpu.name not in out]

    def failed(reason: str) -> Trial:
        return Trial(case.precision, None, 0.0, weight_gb, None, tuple(out), reason)

    if not left:
        return failed(f"no GPU of {case.cluster.name} computes in {case.precision}")
    part = replace(case, cluster=part_of(case.cluster, left))
    try:
        entry = planner.plan(part)
    except InfeasibleError as error:
        return failed(error.what)
    kv = None
    if entry.deployment is not None:
        kv = sum(replica.kv_tokens for replica in entry.deployment.replicas)
    found = goodput(entry, part, seeds)
    return Trial(case.precision, entry, found, weight_gb, kv, tuple(out))
