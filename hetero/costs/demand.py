"""What is asked of a plan: a rate of requests, the lengths they have, and the targets they get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetero.arrays import Floats
from hetero.catalog import Llm
from hetero.cluster import Cluster, cluster
from hetero.costs.cost import IN_PAPERS, CostModel, CostSettings, PipelineStage
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, require
from hetero.simulator.metrics import Slo
from hetero.workload import Trace


@dataclass(frozen=True, eq=False, repr=False)
class Demand(Shown):
    """A rate and a few kinds of requests with their shares.

    Attributes
    ----------
    rate_rps
        Requests per second, as a Poisson process.
    input_tokens, output_tokens, share
        Lengths and shares of the kinds, shape (K,); shares add up to 1.

    Examples
    --------
    >>> from hetero import workload
    >>> demand = Demand.of(workload.load("azure2023_conv"), rate_rps=5.0)
    >>> bool(1000 < demand.mean_input < 1300), bool(180 < demand.mean_output < 240)
    (True, True)
    """

    rate_rps: float
    input_tokens: Floats
    output_tokens: Floats
    share: Floats
    name: str = ""

    def __post_init__(self) -> None:
        kinds = len(self.share)
        good = (
            kinds > 0
            and len(self.input_tokens) == len(self.output_tokens) == kinds
            and min(self.input_tokens.min(), self.output_tokens.min()) >= 1
            and bool(np.isclose(self.share.sum(), 1.0))
            and self.share.min() >= 0
        )
        require(
            good and 0 < self.rate_rps < np.inf,
            f"A demand of {self.rate_rps} requests/s in {kinds} kinds.",
            resolve="give a rate above 0, lengths of 1 or more, and shares that add up to 1.",
        )

    @classmethod
    def of(cls, trace: Trace, rate_rps: float, *, by_input: int = 8, by_output: int = 3) -> Demand:
        """Kinds of a trace: equal shares by input, and of these by output, at their means."""
        inputs = np.maximum(trace.input_tokens.astype(np.float64), 1.0)
        outputs = np.maximum(trace.output_tokens.astype(np.float64), 1.0)
        found = []
        for part in np.array_split(np.argsort(inputs, kind="stable"), by_input):
            ordered = part[np.argsort(outputs[part], kind="stable")]
            found += [
                (inputs[kind].mean(), outputs[kind].mean(), len(kind) / len(inputs))
                for kind in np.array_split(ordered, by_output)
                if len(kind)
            ]
        lengths = np.array(found)
        return cls(rate_rps, lengths[:, 0], lengths[:, 1], lengths[:, 2], trace.name)

    def at(self, rate_rps: float) -> Demand:
        """The same kinds at another rate."""
        return replace(self, rate_rps=rate_rps)

    def mean(self, values: Floats) -> float:
        """Mean of a value per kind, shape (K,).

        Summed in a fixed order: dot products may come out otherwise in another process.
        """
        return float((self.share * values).sum())

    @cached_property
    def mean_input(self) -> float:
        """Mean input [tokens]."""
        return self.mean(self.input_tokens)

    @cached_property
    def mean_output(self) -> float:
        """Mean output [tokens]."""
        return self.mean(self.output_tokens)

    @cached_property
    def _decoding(self) -> tuple[Floats, Floats]:
        """Part of each kind in the time of decoding, and cached tokens of a request meanwhile.

        A request of output o decodes for a time in proportion to o - 1, with its input and on
        average half its output in the cache.
        """
        weight = self.share * np.maximum(self.output_tokens - 1.0, 1e-9)
        return weight, self.input_tokens + self.output_tokens / 2.0

    @cached_property
    def context_tokens(self) -> float:
        """Cached tokens of a request that decodes, averaged over time."""
        weight, held = self._decoding
        return float((weight * held).sum() / weight.sum())

    @cached_property
    def context_spread(self) -> float:
        """Mean square of the same over its squared mean: 1 where all requests are alike."""
        weight, held = self._decoding
        return float((weight * held**2).sum() / weight.sum()) / self.context_tokens**2

    def table(self) -> Table:
        """One row per kind."""
        rows = tuple(
            (float(n), float(o), 100.0 * float(s))
            for n, o, s in zip(self.input_tokens, self.output_tokens, self.share, strict=True)
        )
        columns = (Column("input", "tokens"), Column("output", "tokens"), Column("share", "%"))
        return Table(f"{self.rate_rps:g} requests/s {self.name}".strip(), columns, rows)


def reference(
    llm: Llm, demand: Demand, *, on: Cluster | None = None, settings: CostSettings | None = None
) -> Slo:
    """Latencies that targets are multiples of: a mean request alone on the A100 of the paper.

    Source: ThunderServe, section 5.1: latencies that the SLO scale multiplies.

    Parameters
    ----------
    on
        Cluster whose first machine serves the request with the fewest of its GPUs that hold the
        model; by default the eight A100 of the paper.

    Raises
    ------
    InfeasibleError
        If the model does not fit that machine.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.catalog import llm
    >>> demand = Demand.of(workload.load("azure2023_conv"), rate_rps=5.0)
    >>> target = reference(llm("LLaMA-1-30B"), demand)
    >>> bool(0.1 < target.ttft_s < 0.5), bool(0.02 < target.tpot_s < 0.06)
    (True, True)
    """
    model = CostModel(on or cluster("thunderserve-a100-8"), llm, settings or IN_PAPERS)
    for gpus in range(1, model.machines[0].count + 1):
        if not model.divides(gpus):
            continue
        if model.most_layers(0, gpus, first=True, last=True) >= llm.layers:
            alone = model.pipeline([PipelineStage(0, gpus, llm.layers)])
            first = float(alone.prefill_latency_s(demand.mean_input))
            token = float(alone.decode_step_s(1, demand.context_tokens))
            last = first + token * max(demand.mean_output - 1.0, 0.0)
            return Slo(ttft_s=first, tpot_s=token, e2e_s=last)
    raise InfeasibleError(
        f"{llm.name} does not fit the {model.machines[0].count} x {model.machines[0].gpu.name} "
        "that targets are measured on.",
        resolve="measure targets on a larger machine.",
    )


def scaled(slo: Slo, scale: float) -> Slo:
    """All targets of ``slo`` times ``scale`` (the SLO scale of the paper)."""
    return Slo(*(None if t is None else scale * t for t in (slo.ttft_s, slo.tpot_s, slo.e2e_s)))
