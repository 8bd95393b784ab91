r"""A bound on throughput that no plan of a dense model exceeds: work, and the GPUs that do it.

Whatever the plan, every request of I input and O output tokens takes each of the L layers through

- I prompt tokens, and :math:`I^2 / 2` pairs of attention,
- O - 1 decode tokens, that read at least :math:`\sum_{j=0}^{O-2} (I + j)` cached tokens,

and every step ends in the logits. One GPU of type g spends on one layer at least

.. math::
    \frac{\max(p_g (n + n_{pad}), w_g) + o_g}{n}, \quad a_g, \quad k_g

seconds per token of a step of n tokens, per pair, and per cached token: the terms of the roofline
on a single GPU. Sharing a layer among t GPUs adds all-reduces and repeats the fixed part on each of
them, pipelines add hops and turns of waiting; neither takes any of this work away. The first
falls with n, and a step has no more than :math:`n` = the engine's largest batch (decode) or step
(prefill; or the longest prompt). With y the GPUs of type g busy with work c, and
:math:`W_c` the work of a mean request,

.. math::
    \max \lambda \quad\text{s.t.}\quad \sum_g y_{gc} / cost_{gc} = \lambda W_c \;\forall c,
    \qquad \sum_c y_{gc} \le N_g \;\forall g .

Leaving every part of the work to whichever type does it best relaxes every plan, so no plan
finishes more requests per second from its first arrival to its last token. The bound knows no
targets, no memory and no waiting: a gap to it is no proof that a better plan exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero.apps.portfolio import assumptions
from hetero.costs.cost import CostModel
from hetero.costs.rates import Rates
from hetero.display import Column, Shown, Table
from hetero.latency.step import StepModel
from hetero.programs import Program
from hetero.question import Question
from hetero.workload import Trace

Floats = NDArray[np.float64]

WORK = ("prefill tokens", "prefill pairs", "decode tokens", "cached tokens", "steps", "logits")
"""Parts of the work of a request, see the module."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bound(Shown):
    """The most that the GPUs of a case can serve.

    Attributes
    ----------
    gpus
        Number of GPUs of each type.
    cost_s
        GPU seconds per unit of each part of the work by type, in the order of :data:`WORK`.
    amounts
        Work of each request, sorted, shape (6, N).
    """

    name: str
    gpus: Mapping[str, int]
    cost_s: Mapping[str, Floats]
    amounts: Floats

    def rps(self, share: float = 1.0) -> float:
        """Requests per second that no plan exceeds, any ``share`` of the trace's requests served.

        Who may leave requests out leaves out the largest, part by part of the work.

        Raises
        ------
        SolverError
            If the linear program ends without its optimum.
        """
        kept = max(1, int(np.ceil(share * self.amounts.shape[1] - 1e-9)))
        work = self.amounts[:, :kept].sum(axis=1) / kept
        return self._solve(work)[0]

    def use(self) -> dict[str, Floats]:
        """Share of the GPUs of each type that each part of the work takes at the bound."""
        busy = self._solve(self.amounts.mean(axis=1))[1]
        return {name: busy[k] / count for k, (name, count) in enumerate(self.gpus.items())}

    def _solve(self, work: Floats) -> tuple[float, Floats]:
        speed = np.array([1.0 / np.maximum(self.cost_s[name], 1e-300) for name in self.gpus])
        # Parts that no request has cost 0; the rate is in units of its largest coefficient.
        scale = speed.max(axis=0)
        unit = float((work / scale).max())
        program = Program()
        busy = program.variables(speed.size).reshape(speed.shape)
        rate = program.variables(1, objective=1.0)
        held = program.rows(len(speed), upper=list(self.gpus.values()))
        program.entries(held[:, None], busy, 1.0)
        balance = program.rows(len(work), lower=0.0, upper=0.0)
        program.entries(balance, busy, speed / scale)
        program.entries(balance, rate, -(work / scale) / unit)
        # HiGHS: where types are equally good at a part, GLOP would share it out otherwise.
        values = program.solve(solver="highs", names=f"the bound of {self.name}").values
        return float(values[rate[0]] / unit), values[busy]

    def table(self) -> Table:
        """Where the GPUs' time goes at the bound."""
        rows = tuple(
            (name, self.gpus[name], *(100.0 * float(x) for x in shares))
            for name, shares in self.use().items()
        )
        columns = (
            Column("GPU"),
            Column("number"),
            *(Column(part, "% of time", 3) for part in WORK),
        )
        note = f"No plan serves more than {self.rps():.4g} requests/s."
        return Table(f"Bound: {self.name}", columns, rows, (note,))


def bound(question: Question) -> Bound | None:
    """The bound of a case; None for mixtures of experts, whose step times are others.

    Where a budget is given, it holds for the whole offer, and so for every part of it.

    Examples
    --------
    >>> import numpy as np
    >>> from hetero import catalog, workload
    >>> from hetero.cluster import cluster
    >>> chats = workload.load("azure2023_conv").sample(500, np.random.default_rng(0))
    >>> one = Question(cluster("thunderserve-cloud-32"), catalog.llm("LLaMA-1-30B"), chats, 5.0)
    >>> limit = bound(one)
    >>> bool(5.0 < limit.rps() < limit.rps(0.9) < 50.0)
    True
    """
    return None if question.llm.experts else _bound(question)


@lru_cache(maxsize=32)
def _bound(question: Question) -> Bound:
    costs = assumptions.costs(question)
    cost: dict[str, Floats] = {}
    longest = float(question.trace.input_tokens.max())
    for number, machine in enumerate(costs.machines):
        found = _costs(costs.rates(number, 1), question.llm.layers, longest)
        if costs.engine.limited:  # tables were measured under it, each for one degree
            for gpus in range(1, machine.count + 1):
                found = np.minimum(found, _of_degree(costs, number, gpus, longest))
        # One type may stand in machines with other figures: the better counts.
        cost[machine.gpu.name] = np.minimum(cost.get(machine.gpu.name, found), found)
    return Bound(question.name, question.cluster.gpu_counts, cost, amounts(question.trace))


def _of_degree(costs: CostModel, machine: int, gpus: int, longest: float) -> Floats:
    """GPU seconds per unit of work on some GPUs that share every layer; infinite if they cannot."""
    if not costs.divides(gpus):
        return np.full(len(WORK), np.inf)
    found = gpus * _costs(costs.rates(machine, gpus), costs.llm.layers, longest)
    table = costs.measured(costs.machines[machine], gpus)
    return np.minimum(found, gpus * _costs_of_table(table.step, longest)) if table else found


def _costs_of_table(table: StepModel, longest: float) -> Floats:
    """Seconds per unit of work by a table; the steps themselves are in the times per token."""
    (piece,) = table.pieces
    prompt = max(float(assumptions.ENGINE.max_step_tokens), longest)
    inner = piece.knots_tokens[(piece.knots_tokens >= 1) & (piece.knots_tokens <= prompt)]
    tokens, batch = np.append(inner, prompt), np.arange(1.0, assumptions.ENGINE.max_batch + 1.0)
    return np.array(
        [
            float((piece.seconds(tokens, 0, 0.0, 0.0) / tokens).min()),
            piece.per_pair_s,
            float((piece.seconds(batch, batch, 0.0, 0.0) / batch).min()),
            float(piece.per_cached_token_s.min()),
            0.0,
            0.0,
        ]
    )


def amounts(trace: Trace) -> Floats:
    """Work of every request by part, each part sorted by itself; shape (6, N)."""
    inputs = trace.input_tokens.astype(np.float64)
    steps = np.maximum(trace.output_tokens.astype(np.float64) - 1.0, 0.0)
    cached = steps * inputs + steps * (steps - 1.0) / 2.0
    found = np.array([inputs, inputs**2 / 2.0, steps, cached, steps, steps])
    return np.sort(found, axis=1)


def _costs(one: Rates, layers: int, longest: float) -> Floats:
    """GPU seconds per unit of work on a single GPU, see the module."""
    batch = float(assumptions.ENGINE.max_batch)
    prompt = max(float(assumptions.ENGINE.max_step_tokens), longest)

    def token(n: float) -> float:
        busy = max(one.product_s * (n + one.padding_tokens), one.weights_s) + one.fixed_s
        return layers * busy / n

    return np.array(
        [
            token(prompt),
            layers * one.pair_s,
            token(batch),
            layers * one.cached_s,
            one.step_s / batch,
            one.logits_s / batch,
        ]
    )
