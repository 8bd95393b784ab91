"""Plan, route and simulate large language model serving on mixed fleets of GPUs.

Reading guide. Four files carry the ideas, in this order: ``hetero/latency/step.py`` (what a step of
an engine costs), ``hetero/memory/budget.py`` (what fits on a GPU), ``hetero/workload/trace.py``
(requests) and ``hetero/engine/replica.py`` (the life of a replica from event to event). Folders,
from the ground up; a module imports only from those before its own:

``catalog``, ``workload``, ``cluster``
    GPUs, models and links with their sources; traces and twins; machines and cluster files.
``latency``, ``memory``
    Step times: ``models``, ``sources`` of measurements, ``calibration``; weights and KV cache.
``placement``, ``deployment``, ``engine``
    Layers on nodes; replicas on GPUs; what one does, compiled.
``routers``, ``simulator``, ``comparison``
    Which replica serves a request; what every request sees then; both compared, rate by rate. A
    router is a file here.
``bounds``, ``costs``, ``planners``, ``search``
    What nothing exceeds; what groups of mixed GPUs cost and serve; one folder per system:
    ``xiong``, ``rignall``, ``helix``, ``thunderserve``, and ``baselines``, ``reschedule``; all of
    them asked, and the best plan improved.
``plots``, ``apps``
    Pictures; what people do with all of it: ``ask`` (every option once), ``cards``, ``capacity``,
    ``export``, ``serving``, ``profiling``, ``explorer``, and ``answers``: what commands do, as
    functions of the same words; ``cli``.

Beside the library, ``pipelines/`` runs the notebooks as ``dvc.yaml`` says; ``pipelines/studies``
holds the papers' claims and experiments, ``pipelines/bench`` how fast things are. Every number has
a source: ``data/specs``, ``data/measured``, ``data/published``. How to add a GPU, a router or a
planner is in ``CONTRIBUTING.md``, which function holds which equation of the papers in
``pipelines/docs/pages/papers.md``.

Examples
--------
Which tensor-parallel degree should eight V100 and one A800 use for conversations?

>>> import numpy as np
>>> from hetero import catalog, cluster, workload
>>> from hetero.planners.xiong import tensor_parallel
>>> fleet = cluster.cluster("xiong-v100-a800")
>>> model = catalog.llm("Llama-3-8B")
>>> chats = workload.load("azure2023_conv").sample(200, np.random.default_rng(0))
>>> found = tensor_parallel.search(fleet, model, chats)
>>> for best in found.best:
...     print(best.machine.gpu.name, "degree", best.tensor_parallel)
V100-SXM2-32GB degree 1
A800-PCIE-80GB degree 1

``hetero.plan`` asks every planner, and answers with a plan card: replicas, routing, goodput, cost,
what binds, and what one more machine would bring.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero import catalog as catalog
    from hetero import cluster as cluster
    from hetero import comparison as comparison
    from hetero import routers as routers
    from hetero import workload as workload
    from hetero.apps.answers.exports import export as export
    from hetero.apps.answers.fleets import resilience as resilience
    from hetero.apps.answers.fleets import size as size
    from hetero.apps.answers.simulation import simulation as simulation
    from hetero.apps.cards.answer import plan as plan
    from hetero.apps.cards.card import PlanCard as PlanCard
    from hetero.apps.explorer import explore as explore
    from hetero.cluster import Cluster as Cluster
    from hetero.comparison import compare as compare
    from hetero.deployment import Deployment as Deployment
    from hetero.engines import EngineSpec as EngineSpec
    from hetero.engines import replicated as replicated
    from hetero.plans import Plan as Plan
    from hetero.question import Question as Question
    from hetero.simulator import Slo as Slo
    from hetero.simulator import simulate as simulate
    from hetero.simulator.metrics import metrics as metrics
    from hetero.workload import Trace as Trace

__version__ = "1.0.0"

# Planning brings every planner with it; who only imports hetero does not wait for that, and a
# stage of the pipeline that never plans does not depend on it.
LAZY = {
    "Cluster": "hetero.cluster",
    "Deployment": "hetero.deployment",
    "EngineSpec": "hetero.engines",
    "Plan": "hetero.plans",
    "PlanCard": "hetero.apps.cards.card",
    "Question": "hetero.question",
    "Slo": "hetero.simulator",
    "Trace": "hetero.workload",
    "compare": "hetero.comparison",
    "explore": "hetero.apps.explorer",
    "export": "hetero.apps.answers.exports",
    "load_ipython_extension": "hetero.apps.cli.magics",
    "metrics": "hetero.simulator.metrics",
    "plan": "hetero.apps.cards.answer",
    "replicated": "hetero.engines",
    "resilience": "hetero.apps.answers.fleets",
    "simulate": "hetero.simulator",
    "simulation": "hetero.apps.answers.simulation",
    "size": "hetero.apps.answers.fleets",
}
"""Names that are imported on first use, and where they stand; with six modules beside them."""

_MODULES = {one: f"hetero.{one}" for one in ("catalog", "cluster", "comparison", "routers")}
_MODULES |= {"sweeps": "pipelines.sweep", "workload": "hetero.workload"}


def __getattr__(name: str) -> Any:
    if not (where := LAZY.get(name) or _MODULES.get(name)):
        raise AttributeError(f"module 'hetero' has no attribute '{name}'")
    if name == "sweeps":
        importlib.import_module("hetero.paths").root()  # which says what to do without a checkout
    found = importlib.import_module(where)
    return found if name in _MODULES else getattr(found, name)


def __dir__() -> list[str]:
    return sorted([*LAZY.keys() - {"load_ipython_extension"}, *_MODULES, "__version__"])
