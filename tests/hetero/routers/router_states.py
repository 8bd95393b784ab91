"""Deployments, traces and a checking router that the tests of routers share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero import catalog
from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.latency.step import StepModel
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace

GPUS = ("H100-SXM", "A100-SXM-80GB", "A100-SXM-80GB", "L40S")


def fleet(engine=None, kv_tokens=(60_000, 60_000, 40_000, 9_000)):
    """Four replicas whose speeds and memories differ."""
    engine = engine or Engine(max_batch=24)
    speed = (1.0, 2.0, 2.5, 4.0)
    return Deployment(
        "four",
        tuple(
            Replica(
                f"{k}:{name}",
                StepModel.affine(
                    floor_s=0.01 * speed[k],
                    per_token_s=3e-5 * speed[k],
                    per_cached_token_s=2e-7 * speed[k],
                    per_pair_s=1e-10,
                ),
                kv_tokens=kv_tokens[k],
                kv_bytes_per_token=819_200.0,
                engine=engine,
                gpu=catalog.gpu(name, "heteroserve"),
            )
            for k, name in enumerate(GPUS)
        ),
    )


def trace(count=600, rate_rps=20.0, seed=0, median=500.0):
    """Poisson arrivals of skewed lengths, all below the smallest KV cache."""
    rng = np.random.default_rng(seed)
    return Trace(
        arrival_s=np.cumsum(rng.exponential(1 / rate_rps, count)),
        input_tokens=np.clip(rng.lognormal(np.log(median), 1.2, count), 1, 4096).astype(np.int32),
        output_tokens=np.clip(rng.exponential(120, count), 1, 1500).astype(np.int32),
        name="test",
        source="test",
    )


def phases(roles, kv_tokens, links=(), gbs=10.0):
    """Replicas of one speed by name, of which some only prefill or only decode."""
    step = StepModel.affine(floor_s=0.01, per_token_s=3e-5, per_cached_token_s=2e-7)
    replicas = tuple(
        Replica(name, step, kv_tokens, 1e5, Engine(max_batch=64), role)
        for name, role in roles.items()
    )
    return Deployment("split", replicas, links, KvLink(gbs))


def handed_over(count, rate_rps=20.0):
    """No reply of one token: those end with their prefill and have no decode replica."""
    served = trace(count, rate_rps)
    return replace(served, output_tokens=np.maximum(served.output_tokens, 2))


class Check:
    """Routes by a built-in router and holds every decision against a plain reference.

    The reference has ``expected(request, fleet)``, which returns the set of right answers, and may
    have the hooks ``dispatched(request, replica)``, ``started(index)`` and ``finished(index)``.
    """

    def __init__(self, router, reference, deployment, rng=None):
        self.name, self.oracle = "check", True
        self.live = router.live(deployment, rng)
        self.reference = reference
        self.decisions = []

    def choose(self, request, fleet):
        expected = self.reference.expected(request, fleet)
        chosen = self.live.choose(request, fleet)
        assert chosen in expected, (request, chosen, expected)
        self.decisions.append(chosen)
        if chosen >= 0 and hasattr(self.reference, "dispatched"):
            self.reference.dispatched(request, chosen)
        return chosen

    def on_first_token(self, index, now_s):
        if hasattr(self.reference, "started"):
            self.reference.started(index)

    def on_finish(self, index, now_s):
        if hasattr(self.reference, "finished"):
            self.reference.finished(index)


def check(router, reference, deployment, served, **options):
    """Simulate with every decision checked; returns the decisions."""
    checked = Check(router, reference, deployment)
    simulate(deployment, served, checked, **options)
    return np.array(checked.decisions)


def decide_alike(deployment, served, router, seed, **options):
    """Whether the simulator and ``choose`` decide alike."""
    live = router.live(deployment, stream(seed, "router"))
    fast, slow = (
        simulate(deployment, served, one, seed=seed, **options).requests for one in (router, live)
    )
    return all(
        np.array_equal(fast[column], slow[column], equal_nan=True)
        for column in ("node", "decode_node", "first_token_s", "finish_s")
    )


def near(values, best):
    """Indices whose value ties with the best but for rounding."""
    return {k for k, v in values.items() if abs(v - best) <= 1e-9 * max(1.0, abs(best))}


class Wrong:
    """Predicts a length that has nothing to do with the true one."""

    def predict(self, served, rng):
        return rng.integers(1, 500, len(served)).astype(np.int32)
