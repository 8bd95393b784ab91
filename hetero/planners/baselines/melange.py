r"""Mélange: the cheapest mix of GPU types for requests of many sizes, by integer programming.

Requests fall into buckets s of similar size with rates :math:`\lambda_s`. A kind of machine k can
be divided into instances of several tensor-parallel degrees: a division p holds
:math:`n_{pd}` instances of degree d. :math:`T_{skd}` is what an instance sustains of a bucket
under the targets [requests/s]. With y machines per division and z the share of a bucket that
instances of degree d on machines of kind k serve:

.. math::
    \min \sum_{k,p} c_k\,y_{kp} \quad\text{s.t.}\quad
    \sum_{k,d} z_{skd} = 1 \;\forall s, \quad
    \sum_s \frac{\lambda_s}{T_{skd}} z_{skd} \le \rho \sum_p n_{pd}\,y_{kp} \;\forall k,d, \quad
    \sum_p y_{kp} \le N_k, \quad y \in \mathbb{N}

The published program deals each bucket out in equal slices to whole instances; ``slices`` does
so, by default z is continuous, which a weighted router can follow as well. :math:`\rho` is the
load that instances may reach. For a given fleet the same program finds the largest rate instead.

Source: Griggs et al. 2024 (Mélange), one of ThunderServe's related systems; read as instances
that serve both phases, without pipelines, which is where it differs from ThunderServe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Ints
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.costs.cost import CostSettings, PipelineStage
from hetero.costs.replicas import compared_replica
from hetero.deployment import Deployment, Replica
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, SolverError, require, require_positive, require_share
from hetero.grouping import grouped
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, plan_of, planner
from hetero.planners.baselines.capacity import Bucket, buckets, capacity_rps
from hetero.planners.ground import Kind
from hetero.planners.ground import kinds as find_kinds
from hetero.plans import Plan
from hetero.programs import Program, Solver, SolverLimits
from hetero.question import Question
from hetero.routers import RangeShares
from hetero.simulator import Slo
from hetero.workload import Trace

_LIMITS = SolverLimits(gap=1e-4, nodes=20_000)


@dataclass(frozen=True, repr=False)
class MelangePlan(Shown):
    """Machines to rent, their division into instances, and which requests go where.

    Attributes
    ----------
    rate_rps
        Rate that it serves.
    usd_per_h
        Price of its machines.
    bound
        Bound of the solver on the objective: the least price [$/h], or the largest rate
        [requests/s] of the fleet.
    gap
        Distance of the objective from the bound, over the objective.
    status
        ``"optimal"``, or the limit at which the solver stopped.
    used
        By kind and division: number of machines.
    flow
        By bucket, kind and degree: share of the bucket.
    """

    cluster: Cluster
    llm: Llm
    kinds: tuple[Kind, ...]
    buckets: tuple[Bucket, ...]
    rate_rps: float
    usd_per_h: float | None
    bound: float
    gap: float
    status: str
    used: tuple[tuple[int, tuple[int, ...], int], ...]
    flow: tuple[tuple[int, int, int, float], ...]

    def deployment(self, name: str = "Mélange") -> Deployment:
        """The instances as replicas."""
        found = [replace(replica, name=label) for _, replica, label in self._placed()]
        return Deployment(name, tuple(found))

    def places(self) -> tuple[tuple[str, int, str], ...]:
        """Machine, degree and name of each replica of :meth:`deployment`, in their order."""
        return tuple(
            (label.rpartition("/")[0], degree, label) for (_, degree), _, label in self._placed()
        )

    def _placed(self) -> list[tuple[tuple[int, int], Replica, str]]:
        placed = []
        for k, kind in enumerate(self.kinds):
            free = list(kind.machines)
            for number, division, count in self.used:
                if number != k:
                    continue
                for _ in range(count):
                    where = self.cluster.machines[free.pop(0)].name
                    for n, degree in enumerate(division):
                        placed.append(((k, degree), kind.instances[degree], f"{where}/{n}"))
        return placed

    def router(self) -> RangeShares:
        """Requests to instances in the shares of the plan, by the length of their input."""
        homes = grouped((key, index) for index, (key, _, _) in enumerate(self._placed()))
        ranges = sorted({bucket.input_range for bucket in self.buckets})
        count = sum(len(where) for where in homes.values())
        weights = {span: [0.0] * count for span in ranges}
        for s, k, degree, share in self.flow:
            bucket = self.buckets[s]
            where = homes.get((k, degree), [])
            for index in where:
                weights[bucket.input_range][index] += bucket.share * share / len(where)
        rows = np.array(list(weights.values()))
        ends = np.array([end for _, end in weights])
        return RangeShares(ends, rows, np.zeros_like(rows), name="shares by size")

    def table(self) -> Table:
        """One row per kind of machine and division."""

        def price(part: tuple[int, tuple[int, ...], int]) -> float | None:
            each = self.kinds[part[0]].machine.usd_per_h
            return None if each is None else part[2] * float(each)

        def instances(part: tuple[int, tuple[int, ...], int]) -> str:
            return " + ".join(f"{d} GPU{'s' if d > 1 else ''}" for d in part[1])

        total = "" if self.usd_per_h is None else f" for {self.usd_per_h:.3f} $/h"
        return Table.of(
            f"Mélange: {self.llm.name} at {self.rate_rps:.3g} requests/s{total}",
            (
                Column("machines of", of=lambda part: self.kinds[part[0]].machine.gpu.name),
                Column("number", of=lambda part: part[2]),
                Column("instances of each", of=instances),
                Column("price", "$/h", of=price),
            ),
            self.used,
            f"{self.status}; bound {self.bound:.5g}, gap {100 * self.gap:.2g} %",
        )


def cheapest(
    cluster: Cluster,
    llm: Llm,
    trace: Trace,
    rate_rps: float,
    *,
    slo: Slo | None = None,
    slices: int | None = None,
    load: float = 0.85,
    settings: CostSettings | None = None,
) -> MelangePlan:
    """The cheapest machines of a cluster that serve a rate of requests like those of a trace.

    Parameters
    ----------
    cluster
        What can be rented: machines whole, each at its price.
    slices
        Equal parts that each bucket is dealt out in; by default continuous shares.
    load
        Largest share of what instances sustain (rho); what is left absorbs bursts.

    Raises
    ------
    InfeasibleError
        If some requests fit no instance under the targets, or all machines do not suffice; the
        text names which, and the largest rate that they serve.
    """
    for machine in cluster.machines:
        require(
            machine.usd_per_h is not None,
            f"Machine '{machine.name}' has no price, so no cheapest mix exists.",
            resolve="add usd_per_h to it, or ask for the largest rate of the fleet.",
        )
    require_positive(rate_rps=rate_rps)
    program = MelangeProgram(cluster, llm, trace, slo, slices=slices, load=load, settings=settings)
    most = program.largest()
    if most.rate_rps < rate_rps * (1 - 1e-9):
        raise InfeasibleError(
            f"All {len(cluster.machines)} machines of {cluster.name} serve {most.rate_rps:.4g} of "
            f"the {rate_rps:g} requests/s.",
            resolve="offer more machines, relax the targets, or lower the rate.",
        )
    return program.cheapest(rate_rps)


def fastest(
    cluster: Cluster,
    llm: Llm,
    trace: Trace,
    *,
    slo: Slo | None = None,
    load: float = 0.85,
    usd_per_h: float | None = None,
    settings: CostSettings | None = None,
) -> MelangePlan:
    """The largest rate that a cluster, or machines of it within a budget, serves.

    Examples
    --------
    >>> from hetero import catalog, workload
    >>> from hetero.cluster import cluster
    >>> found = fastest(
    ...     cluster("thunderserve-a40-3090ti-40gbit"),
    ...     catalog.llm("LLaMA-1-30B"),
    ...     workload.load("azure2023_conv").head(2000),
    ... )
    >>> found.status, found.rate_rps > 0.5
    ('optimal', True)
    """
    return MelangeProgram(cluster, llm, trace, slo, load=load, settings=settings).largest(usd_per_h)


class MelangeProgram:
    """The integer program of one cluster, model and workload.

    ``kinds`` are those that may be used, with their divisions, by default all; ``most_gpus`` the
    largest number of GPUs of a type; ``parts`` the ranges of inputs, and of outputs in each.
    ``columns`` are the kinds with the numbers of their divisions, in the order of y.
    """

    def __init__(
        self,
        cluster: Cluster,
        llm: Llm,
        trace: Trace,
        slo: Slo | None = None,
        *,
        slices: int | None = None,
        load: float = 0.85,
        settings: CostSettings | None = None,
        kinds: Sequence[Kind] | None = None,
        most_gpus: Mapping[str, int] | None = None,
        parts: tuple[int, int] = (6, 4),
        solver: Solver = "highs",
    ) -> None:
        require_share(load=load)
        if slices is not None:
            require_positive(slices=slices)
        self.cluster, self.llm, self.slices, self.load = cluster, llm, slices, load
        self.solver = solver
        self.kinds = find_kinds(cluster, llm, settings) if kinds is None else tuple(kinds)
        self.columns = [
            (k, p) for k, one in enumerate(self.kinds) for p in range(len(one.divisions))
        ]
        self.most_gpus = dict(most_gpus or {})
        self.buckets = buckets(trace, inputs=parts[0], outputs=parts[1])
        self.rates = {
            (s, k, d): rate
            for s, bucket in enumerate(self.buckets)
            for k, kind in enumerate(self.kinds)
            for d, one in kind.instances.items()
            if (rate := capacity_rps(one, bucket, slo)) > 0
        }
        for s, bucket in enumerate(self.buckets):
            if not any(key[0] == s for key in self.rates):
                raise InfeasibleError(
                    f"No instance of {llm.name} on {cluster.name} serves requests of "
                    f"{bucket.label} within the targets.",
                    resolve="relax the targets, offer larger GPUs, or cut long requests.",
                )

    def cheapest(self, rate_rps: float) -> MelangePlan:
        """The machines of least price that serve a rate."""
        program = Program(minimize=True)
        machines = self._machines(program, self._prices())
        shares, _ = self.serve(program, [machines], rate_rps, slices=self.slices)
        return self._solve(program, machines, shares, rate_rps=rate_rps)

    def largest(self, usd_per_h: float | None = None) -> MelangePlan:
        """The largest rate; z is then requests per second, so that the program stays linear."""
        program = Program()
        machines = self._machines(program, 0.0)
        shares, sums = self.serve(program, [machines], 1.0, total=0.0)
        rate = program.variables(1, objective=1.0)
        program.entries(sums, rate, -1.0)
        if usd_per_h is not None:
            program.entries(program.rows(1, upper=usd_per_h), machines, self._prices())
        return self._solve(program, machines, shares, rate=int(rate[0]))

    def _prices(self) -> list[float]:
        return [float(self.kinds[k].machine.usd_per_h or 0.0) for k, _ in self.columns]

    def _machines(self, program: Program, objective: ArrayLike) -> Ints:
        most = [len(self.kinds[k].machines) for k, _ in self.columns]
        return program.variables(len(most), upper=most, objective=objective, integer=True)

    def serve(
        self,
        program: Program,
        machines: Sequence[Ints],
        rate_rps: float,
        *,
        slices: int | None = None,
        total: float = 1.0,
    ) -> tuple[Ints, Ints]:
        """Let machines serve a rate: the variables z of the shares, and the rows of their sums.

        Parameters
        ----------
        machines
            Variables y in the order of the columns; the machines of several such lists add up.
        slices
            Equal parts of a bucket, of which z then counts whole ones; by default z is continuous.
        total
            Sum of the shares of a bucket.
        """
        parts = slices or 1
        kind = np.array([k for k, _ in self.columns])
        numbers = program.rows(len(self.kinds), upper=[len(one.machines) for one in self.kinds])
        gpus = program.rows(len(self.most_gpus), upper=list(self.most_gpus.values()))
        degrees = list(dict.fromkeys((k, d) for _, k, d in self.rates))
        busy = program.rows(len(degrees), upper=0.0)
        sums = program.rows(len(self.buckets), lower=parts * total, upper=parts * total)
        for y in machines:
            program.entries(numbers[kind], y, 1.0)
            for row, name in zip(gpus, self.most_gpus, strict=True):
                each = [self.kinds[k].machine for k in kind]
                program.entries(row, y, [m.count if m.gpu.name == name else 0 for m in each])
            for row, (k, d) in zip(busy, degrees, strict=True):
                held = [
                    self.kinds[k].divisions[p].count(d) if k == kk else 0 for kk, p in self.columns
                ]
                program.entries(row, y, -self.load * np.array(held))
        shares = program.variables(len(self.rates), integer=slices is not None)
        at = [degrees.index((k, d)) for _, k, d in self.rates]
        work = [
            rate_rps * (self.buckets[s].share / (rate * parts))
            for (s, _, _), rate in self.rates.items()
        ]
        program.entries(busy[at], shares, work)
        program.entries(sums[[s for s, _, _ in self.rates]], shares, 1.0)
        return shares, sums

    def _solve(
        self,
        program: Program,
        machines: Ints,
        shares: Ints,
        *,
        rate_rps: float = 0.0,
        rate: int | None = None,
    ) -> MelangePlan:
        try:
            names = f"the program of {self.cluster.name}"
            found = program.solve(_LIMITS, solver=self.solver, names=names)
        except (InfeasibleError, SolverError) as error:
            raise InfeasibleError(
                f"No plan for {self.cluster.name}: {error.what}",
                resolve="offer more machines, or relax the targets.",
            ) from error
        values = found.values
        served = rate_rps if rate is None else float(values[rate])
        scale = self.slices or 1 if rate is None else max(served, 1e-300)
        used = tuple(
            (k, self.kinds[k].divisions[p], count)
            for (k, p), y in zip(self.columns, machines, strict=True)
            if (count := round(values[y])) > 0
        )
        prices = [self.kinds[k].machine.usd_per_h for k, _, _ in used]
        price = None
        if None not in prices:
            price = sum(
                float(self.kinds[k].machine.usd_per_h or 0.0) * count for k, _, count in used
            )
        return MelangePlan(
            cluster=self.cluster,
            llm=self.llm,
            kinds=self.kinds,
            buckets=self.buckets,
            rate_rps=served,
            usd_per_h=price,
            bound=found.dual_bound,
            gap=found.dual_gap,
            status="optimal" if found.status == "optimal" else "stopped (Limit.NODE)",
            used=used,
            flow=tuple(
                (s, k, d, float(values[z]) / scale)
                for (s, k, d), z in zip(self.rates, shares, strict=True)
                if values[z] > 1e-9 * scale
            ),
        )


@planner("Mélange", rents=True)
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """Instances of many sizes for requests of many sizes, by integer program (Mélange)."""
    costs = ground.costs(question)
    found = fastest(
        question.cluster,
        question.llm,
        question.trace,
        slo=question.slo,
        usd_per_h=question.budget_usd_per_h,
        settings=costs.settings,
    )
    numbers = {machine.name: k for k, machine in enumerate(costs.machines)}
    pipelines = [
        costs.pipeline([PipelineStage(numbers[machine], degree, question.llm.layers)])
        for machine, degree, _ in found.places()
    ]
    nodes = [
        compared_replica(one, label)
        for one, (_, _, label) in zip(pipelines, found.places(), strict=True)
    ]
    if not nodes:
        raise InfeasibleError(
            f"{question.cluster.name} has no machine that serves {question.llm.name} within "
            "the targets and the budget.",
            resolve="relax the targets, raise the budget, or offer larger GPUs.",
        )
    return plan_of(
        plan.name,
        Deployment(f"{plan.name} on {question.cluster.name}", tuple(nodes)),
        pipelines,
        found.router(),
        "fixed shares by length of the input",
        bound_rps=found.bound,
        bound="largest rate of its integer program at 85 % load",
        notes=(f"{found.rate_rps:.4g} requests/s by the program, {found.status}.",),
        evidence=found,
    )
