"""Compile what most questions run, on two cores at once: ``python -m hetero.simulator.warm``."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from hetero.deployment import Deployment, Replica
from hetero.latency.step import StepModel
from hetero.routers import LeastTokens, Request
from hetero.routers.base import FleetState
from hetero.simulator import Event, Slo, simulate
from hetero.simulator.drivers import Watch
from hetero.workload import Trace


class _First:
    name = "first"

    def choose(self, request: Request, fleet: FleetState) -> int:
        return 0


def _built_in(pair: Deployment, trace: Trace) -> None:
    """Routers of this project, and what looks at a run while it goes on."""
    simulate(pair, trace, LeastTokens(), sample_s=1.0, watch=Watch(Slo(ttft_s=9.0), 0, 9, 0.9))


def _others(pair: Deployment, trace: Trace) -> None:
    """A router in Python, and a replica that fails."""
    simulate(pair, trace, _First(), events=[Event(0.5, "a"), Event(0.6, "a", "recover")])


_PARTS = {"built-in": _built_in, "others": _others}


def main(parts: list[str]) -> None:
    """Run a few requests: of the parts named, or each part in a process of its own."""
    if not parts:
        started = [subprocess.Popen([sys.executable, "-m", __spec__.name, one]) for one in _PARTS]
        sys.exit(max(one.wait() for one in started))
    step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    pair = Deployment("pair", tuple(Replica(name, step, kv_tokens=50_000) for name in "ab"))
    trace = Trace(np.arange(9) / 9, np.full(9, 100), np.full(9, 10))
    for one in parts:
        _PARTS[one](pair, trace)


if __name__ == "__main__":
    main(sys.argv[1:])
