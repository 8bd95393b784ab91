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
from typing import Any

from ortools.math_opt.python import mathopt

from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.costs.cost import Settings
from hetero.deployment import Deployment, Replica
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.baselines.capacity import Bucket, buckets, capacity_rps
from hetero.planners.baselines.kinds import Kind
from hetero.planners.baselines.kinds import kinds as find_kinds
from hetero.planners.baselines.sizes import SizeShares
from hetero.simulator import Slo
from hetero.workload import Trace

_GAP = 1e-4


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
                        label = f"{where}/{n}"
                        placed.append(((k, degree), kind.instances[degree], label))
        return placed

    def router(self) -> SizeShares:
        """Requests to instances in the shares of the plan, by the length of their input."""
        homes: dict[tuple[int, int], list[int]] = {}
        for index, (key, _, _) in enumerate(self._placed()):
            homes.setdefault(key, []).append(index)
        ranges = sorted({bucket.input_range for bucket in self.buckets})
        count = sum(len(where) for where in homes.values())
        weights = {span: [0.0] * count for span in ranges}
        for s, k, degree, share in self.flow:
            bucket = self.buckets[s]
            where = homes.get((k, degree), [])
            for index in where:
                weights[bucket.input_range][index] += bucket.share * share / len(where)
        return SizeShares(tuple((span[1], tuple(row)) for span, row in weights.items()))

    def table(self) -> Table:
        """One row per kind of machine and division."""
        rows = tuple(
            (
                self.kinds[k].machine.gpu.name,
                count,
                " + ".join(f"{d} GPU{'s' if d > 1 else ''}" for d in division),
                None
                if self.kinds[k].machine.usd_per_h is None
                else count * float(self.kinds[k].machine.usd_per_h or 0.0),
            )
            for k, division, count in self.used
        )
        price = "" if self.usd_per_h is None else f" for {self.usd_per_h:.3f} $/h"
        return Table(
            f"Mélange: {self.llm.name} at {self.rate_rps:.3g} requests/s{price}",
            (
                Column("machines of"),
                Column("number"),
                Column("instances of each"),
                Column("price", "$/h"),
            ),
            rows,
            (f"{self.status}; bound {self.bound:.5g}, gap {100 * self.gap:.2g} %",),
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
    settings: Settings | None = None,
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
    ParameterError
        If the rate or load is out of range, or a machine has no price.
    InfeasibleError
        If some requests fit no instance under the targets, or all machines do not suffice; the
        text names which, and the largest rate that they serve.
    """
    for machine in cluster.machines:
        if machine.usd_per_h is None:
            raise ParameterError(
                f"Machine '{machine.name}' has no price, so no cheapest mix exists.",
                resolve="add usd_per_h to it, or ask for the largest rate of the fleet.",
            )
    if not rate_rps > 0:
        raise ParameterError(
            f"A rate of {rate_rps} requests/s needs no machine.", resolve="give a rate above 0."
        )
    program = Program(cluster, llm, trace, slo, slices=slices, load=load, settings=settings)
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
    settings: Settings | None = None,
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
    program = Program(cluster, llm, trace, slo, load=load, settings=settings)
    return program.largest(usd_per_h)


class Program:
    """The integer program of one cluster, model and workload.

    ``kinds`` are those that may be used, with their divisions, by default all; ``most_gpus`` the
    largest number of GPUs of a type; ``parts`` the ranges of inputs, and of outputs in each. HiGHS,
    the default solver, may print where kinds are many.
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
        settings: Settings | None = None,
        kinds: Sequence[Kind] | None = None,
        most_gpus: Mapping[str, int] | None = None,
        parts: tuple[int, int] = (6, 4),
        solver: mathopt.SolverType = mathopt.SolverType.HIGHS,
    ) -> None:
        if not 0 < load <= 1 or (slices is not None and slices < 1):
            raise ParameterError(
                f"load is {load} and slices {slices}.",
                resolve="give a load above 0 and up to 1, and whole slices or none.",
            )
        self.cluster, self.llm, self.slices, self.load = cluster, llm, slices, load
        self.solver = solver
        self.kinds = find_kinds(cluster, llm, settings) if kinds is None else tuple(kinds)
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
        model, machines, shares = self._model(self.slices)
        for (k, d), work in self.work(shares, self.slices or 1).items():
            model.add_linear_constraint(rate_rps * work <= self.load * self.held(machines, k, d))
        # Each bucket is served whole.
        for s in range(len(self.buckets)):
            parts = [z for key, z in shares.items() if key[0] == s]
            model.add_linear_constraint(mathopt.LinearSum(parts) == (self.slices or 1))
        model.minimize(self.price(machines))
        return self._solve(model, machines, shares, rate_rps)

    def largest(self, usd_per_h: float | None = None) -> MelangePlan:
        """The largest rate; z is then requests per second, so that the program stays linear."""
        model, machines, shares = self._model(None)
        rate = model.add_variable(lb=0.0, name="rate")
        for (k, d), work in self.work(shares, 1).items():
            model.add_linear_constraint(work <= self.load * self.held(machines, k, d))
        for s in range(len(self.buckets)):
            parts = [z for key, z in shares.items() if key[0] == s]
            model.add_linear_constraint(mathopt.LinearSum(parts) == rate)
        if usd_per_h is not None:
            model.add_linear_constraint(self.price(machines) <= usd_per_h)
        model.maximize(rate)
        return self._solve(model, machines, shares, None, rate)

    def _model(self, slices: int | None) -> tuple[Any, dict[Any, Any], dict[Any, Any]]:
        model = mathopt.Model(name="melange")
        machines = {
            (k, p): model.add_integer_variable(lb=0, ub=len(kind.machines), name=f"y{k}_{p}")
            for k, kind in enumerate(self.kinds)
            for p in range(len(kind.divisions))
        }
        for k, kind in enumerate(self.kinds):
            every = [machines[k, p] for p in range(len(kind.divisions))]
            model.add_linear_constraint(mathopt.LinearSum(every) <= len(kind.machines))
        self.limit(model, machines)
        shares = {
            (s, k, d): model.add_variable(
                lb=0.0, is_integer=slices is not None, name=f"z{s}_{k}_{d}"
            )
            for s, k, d in self.rates
        }
        return model, machines, shares

    def limit(self, model: Any, machines: dict[Any, Any]) -> None:
        """Keep the GPUs of each type within their largest number."""
        for name, most in self.most_gpus.items():
            of_type = [
                self.kinds[k].machine.count * y
                for (k, _), y in machines.items()
                if self.kinds[k].machine.gpu.name == name
            ]
            model.add_linear_constraint(mathopt.LinearSum(of_type) <= most)

    def work(self, shares: dict[Any, Any], parts: int) -> dict[tuple[int, int], Any]:
        """Instances busy with the shares, per kind and degree, at one request per second."""
        found: dict[tuple[int, int], list[Any]] = {}
        for (s, k, d), z in shares.items():
            cost = self.buckets[s].share / (self.rates[s, k, d] * parts)
            found.setdefault((k, d), []).append(cost * z)
        return {key: mathopt.LinearSum(terms) for key, terms in found.items()}

    def held(self, machines: dict[Any, Any], k: int, d: int) -> Any:
        """Instances of a degree that machines of a kind hold."""
        divisions = self.kinds[k].divisions
        return mathopt.LinearSum(
            [division.count(d) * machines[k, p] for p, division in enumerate(divisions)]
        )

    def price(self, machines: dict[Any, Any]) -> Any:
        """Price of the machines [$/h]."""
        return mathopt.LinearSum(
            [float(self.kinds[k].machine.usd_per_h or 0.0) * y for (k, _), y in machines.items()]
        )

    def _solve(
        self,
        model: Any,
        machines: dict[Any, Any],
        shares: dict[Any, Any],
        rate_rps: float | None,
        rate: Any = None,
    ) -> MelangePlan:
        limits = mathopt.SolveParameters(relative_gap_tolerance=_GAP, node_limit=20_000)
        result = mathopt.solve(model, self.solver, params=limits)
        if not result.has_primal_feasible_solution():
            raise InfeasibleError(
                f"The program of {self.cluster.name} ended without a plan "
                f"({result.termination.reason.name.lower()}).",
                resolve="offer more machines, or relax the targets.",
            )
        objective, bound = result.objective_value(), result.best_objective_bound()
        optimal = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        values = result.variable_values()
        served = rate_rps if rate_rps is not None else float(values[rate])
        scale = self.slices or 1 if rate is None else max(served, 1e-300)
        used = tuple(
            (k, self.kinds[k].divisions[p], count)
            for (k, p), y in machines.items()
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
            bound=bound,
            gap=abs(objective - bound) / max(abs(objective), 1e-300),
            status="optimal" if optimal else f"stopped ({result.termination.limit})",
            used=used,
            flow=tuple(
                (s, k, d, float(values[z]) / scale)
                for (s, k, d), z in shares.items()
                if values[z] > 1e-9 * scale
            ),
        )
