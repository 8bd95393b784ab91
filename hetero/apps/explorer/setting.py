"""What an exploration starts from: a model deployed on a cluster, and requests to serve."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero import catalog, workload
from hetero import cluster as clusters
from hetero.apps.explorer.bound import bound_rps
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.comparison import footing
from hetero.deployment import Deployment
from hetero.display import Shown, Table
from hetero.engines import EngineSpec, replicated
from hetero.errors import ParameterError
from hetero.planners.xiong import plan as xiong
from hetero.simulator.sustained import came
from hetero.streams import stream
from hetero.workload import Trace, TraceSource

_KEPT = 16


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Exploration(Shown):
    """A model on a cluster, and the requests that it is to serve.

    Attributes
    ----------
    deployment
        Replicas of the best tensor-parallel degree of each machine (Xiong et al.) under vLLM as it
        starts; or the deployment that was given.
    requests
        Lengths that are played; arrivals are drawn for each rate.
    bound_rps
        Rate that no router can exceed [requests/s], see :mod:`hetero.apps.explorer.bound`; None
        where there is none.
    notes
        Machines left out, and why; what runs stand on.
    """

    deployment: Deployment
    requests: Trace
    bound_rps: float | None
    notes: tuple[str, ...] = ()

    def table(self) -> Table:
        """The deployment, with the bound below it."""
        shown = self.deployment.table()
        bound = (
            ()
            if self.bound_rps is None
            else (
                f"No router gets more than {self.bound_rps:.4g} requests/s of {self.requests.name} "
                "out of it.",
            )
        )
        return replace(shown, notes=(*shown.notes, *self.notes, *bound))


# By the identity of its parts, which the entries keep alive.
_settings: OrderedDict[tuple[object, ...], tuple[tuple[object, ...], Exploration]] = OrderedDict()


def setting(
    cluster: Cluster | Deployment | str,
    llm: Llm | str,
    requests: Trace | str,
    *,
    source: TraceSource = "twin",
    count: int = 1500,
    seed: int = 0,
) -> Exploration:
    """Choose a deployment and bound it; asked again for the same, the answer is at hand.

    Raises
    ------
    InfeasibleError
        If no machine can hold the model.
    CatalogError, ParameterError
        If a name is unknown.
    """
    at = clusters.find(cluster) if isinstance(cluster, str) else cluster
    model = catalog.find_llm(llm) if isinstance(llm, str) else llm
    drawn = _workload(requests, source, seed) if isinstance(requests, str) else requests
    parts = (at, model, drawn)
    key = (*map(id, parts), count, seed)
    if key in _settings:
        _settings.move_to_end(key)
        return _settings[key][1]
    made = _make(at, model, drawn, count, seed)
    _settings[key] = (parts, made)
    if len(_settings) > _KEPT:
        _settings.popitem(last=False)
    return made


@lru_cache(maxsize=8)
def _workload(name: str, source: TraceSource, seed: int) -> Trace:
    known = name in workload.names()
    return workload.open_trace(name, workload.attainable(name, source) if known else source, seed)


def _make(at: Cluster | Deployment, llm: Llm, trace: Trace, count: int, seed: int) -> Exploration:
    if count < 1:
        raise ParameterError(
            f"{count} requests cannot be served.", resolve="give a number above 0."
        )
    rng = stream(seed, "requests")
    # The order of a trace says nothing of its lengths: a sample stands for all of it.
    requests = trace.sample(min(count, len(trace)), rng) if len(trace) > count else trace
    left: tuple[str, ...] = ()
    if isinstance(at, Deployment):
        deployment = at
    else:
        engine = EngineSpec()
        degrees = xiong.degrees(at, xiong.search(at, llm, requests, engine, seed=seed))
        deployment = replicated(at, llm, degrees, engine, trace=requests)
        idle = [machine.name for machine in at.machines if machine.name not in degrees]
        if idle:
            shown = ", ".join(idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
            left = (f"Left out, since {llm.name} does not fit: {shown}.",)
    notes = (*left, footing(deployment.replicas, came(requests), [seed]))
    return Exploration(deployment, requests, bound_rps(deployment, requests), notes)
