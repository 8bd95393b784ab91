"""Plan, route and simulate large language model serving on mixed fleets of GPUs.

Reading guide. Four files carry the ideas; read them in this order:

1. ``hetero/latency/step.py``: what a step of an engine costs, the one contract that every source
   of latency (fits, measured tables, spec sheets) reduces to.
2. ``hetero/memory/budget.py``: what fits on a GPU, and how many requests its KV cache holds.
3. ``hetero/workload/trace.py``: requests, real or drawn from a statistical twin.
4. ``hetero/engine/replica.py``: the life of a replica from event to event, in closed form; what
   ``hetero.simulator`` plays and every router in ``hetero.routers`` looks at.

``hetero/planners/xiong/tensor_parallel.py`` is the first planner and uses the first three. The
notebooks ask one question each, ``pipelines/`` runs them, ``dvc.yaml`` says what depends on what.
Every number has a source: see ``data/specs``, ``data/measured`` and ``data/published``.

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
    from hetero.apps.cards.answer import plan as plan

__version__ = "0.1.0"


# Planning brings every planner with it; who only imports hetero does not wait for that, and a
# stage of the pipeline that never plans does not depend on it.
LAZY = {"plan": "hetero.apps.cards.answer"}
"""Names that are imported on first use, and where they stand."""


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(LAZY[name]), name)
    raise AttributeError(f"module 'hetero' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *LAZY])
