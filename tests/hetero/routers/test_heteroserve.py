"""Eq. 2 to 6 of HeteroServe and its baselines against plain re-implementations."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import numpy as np
import pytest

from hetero.routers import (
    CapacityProportional,
    HeteroServe,
    LatencyAware,
    LengthAware,
    batch_limits,
    uniform_limits,
)
from hetero.routers.heteroserve import EXPONENTS, capability_scores
from hetero.simulator import simulate
from tests.hetero.routers.router_states import check, fleet, near, trace

# F [TFLOPS], M [GB], B [TB/s] as section 4.1 prints them; HBM counts in GiB.
FIGURES = {"h100": (989, 80, 3.35), "a100": (312, 80, 2.0), "l40s": (362, 48, 0.864)}
ORDER = ("h100", "a100", "a100", "l40s")


def scores(exponents):
    kappa = [math.prod(x**p for x, p in zip(FIGURES[g], exponents, strict=True)) for g in ORDER]
    return [k / sum(kappa) for k in kappa]


class Dispatcher:
    """Sections 3.2 to 3.4 in plain Python; queue depths as of the last epoch of 100 ms."""

    def __init__(self, router, admits):
        self.router, self.admits = router, admits
        self.window = deque(maxlen=128)
        self.queues, self.epoch, self.credits = [0] * 4, -1, [0.0] * 4

    def exponents(self):
        if not self.router.dynamic or not self.window:
            return (0.40, 0.30, 0.30)
        median = sorted(self.window)[(len(self.window) - 1) // 2]
        if median <= 192:
            return (0.55, 0.15, 0.30)
        return (0.40, 0.30, 0.30) if median <= 768 else (0.20, 0.50, 0.30)

    def expected(self, request, fleet):
        r = self.router
        epoch = math.floor(fleet.now_s / r.epoch_s)
        if epoch > self.epoch:
            depth = fleet.outstanding if r.queue == "outstanding" else fleet.waiting
            self.queues, self.epoch = depth.tolist(), epoch
        which = sum(request.input_tokens >= edge for edge in r.bins_tokens)
        kappa = scores(self.exponents())
        if r.feedback:
            q = self.queues
            kappa = [
                k * math.exp(-r.dampening * d / r.queue_max) for k, d in zip(kappa, q, strict=True)
            ]
        able = [i for i in range(4) if fleet.eligible[i]]
        in_bin = [i for i in able if self.admits[which][i] or not r.binning]
        short = [i for i in in_bin if not r.feedback or self.queues[i] < r.queue_max]
        open_ = short or in_bin or able
        self.window.append(request.input_tokens)
        if r.dispatch == "highest":
            values = {i: kappa[i] for i in open_}
        else:
            for i in open_:
                self.credits[i] += kappa[i] / sum(kappa[j] for j in open_)
            values = {i: self.credits[i] for i in open_}
        return near(values, max(values.values()))

    def dispatched(self, request, i):
        if self.router.dispatch == "proportional":
            self.credits[i] -= 1.0


@pytest.mark.parametrize("queue", ["waiting", "outstanding"])
@pytest.mark.parametrize("dispatch", ["highest", "proportional"])
@pytest.mark.parametrize("off", ["", "feedback", "binning", "dynamic"])
def test_every_decision_follows_sections_3_2_to_3_4(queue, dispatch, off):
    switches = {off: False} if off else {}
    router = HeteroServe(
        dispatch=dispatch, queue=queue, queue_max=6.0, footprint_tokens=300, **switches
    )
    deployment = fleet()
    admits = router.admissions(deployment)
    # Prompts grow through the run, so that the window passes through all three regimes.
    short, medium, long = (
        trace(250, 25.0, seed=k, median=m) for k, m in enumerate((90, 400, 1800))
    )
    served = dataclasses.replace(
        short,
        arrival_s=np.concatenate([short.arrival_s, medium.arrival_s + 12, long.arrival_s + 24]),
        input_tokens=np.concatenate([t.input_tokens for t in (short, medium, long)]),
        output_tokens=np.concatenate([t.output_tokens for t in (short, medium, long)]),
    )
    served = served.take(np.argsort(served.arrival_s, kind="stable"))
    chosen = check(router, Dispatcher(router, admits), deployment, served)
    assert len(chosen) == 750


@pytest.mark.parametrize("exponents", EXPONENTS)
def test_capability_scores_are_the_normalised_geometric_means(exponents):
    got = capability_scores(fleet(), exponents)
    assert got == pytest.approx(scores(exponents), rel=1e-9)
    assert sum(exponents) == pytest.approx(1.0)


def test_regimes_change_with_the_lower_median_of_128_prompts():
    """192 tokens are still short, 193 are medium; 768 medium, 769 long."""
    deployment = fleet()
    for tokens, exponents in ((192, 0), (193, 1), (768, 1), (769, 2)):
        router = HeteroServe(feedback=False, binning=False, dispatch="proportional")
        served = dataclasses.replace(trace(1200), input_tokens=np.full(1200, tokens, np.int32))
        run = simulate(deployment, served, router)
        share = np.bincount(run.requests["node"], minlength=4) / 1200
        assert share == pytest.approx(scores(EXPONENTS[exponents]), abs=0.003)


def test_bins_are_admitted_where_eq_4_holds():
    """KV at the upper edge plus the 90th percentile of outputs, and 10 % of memory kept free."""
    deployment = fleet(kv_tokens=(60_000, 60_000, 12_000, 9_000))
    bytes_per_token = 819_200.0
    router = HeteroServe()
    for b, end in enumerate((256, 512, 2048, 4096)):
        for i, memory_gib in enumerate((80, 80, 80, 48)):
            kept = 0.1 * memory_gib * 1e9
            left = deployment.replicas[i].kv_tokens * bytes_per_token - kept
            fits = (end + 589) * bytes_per_token <= left
            assert router.admissions(deployment)[b, i] == fits
    assert not router.admissions(deployment).all()
    assert HeteroServe(binning=False).admissions(deployment).all()


def test_batch_limits_of_eq_6():
    limited = batch_limits(fleet(), safety=0.1, sequence_tokens=1300)
    kept = [0.1 * m * 1e9 / 819_200 for m in (80, 80, 80, 48)]
    room = [
        max(1, math.floor((r.kv_tokens - k) / 1300))
        for r, k in zip(fleet().replicas, kept, strict=True)
    ]
    assert [r.engine.max_batch for r in limited.replicas] == room
    assert {r.engine.max_batch for r in uniform_limits(limited).replicas} == {min(room)}


class LeastWait:
    def __init__(self, speeds):
        self.speeds, self.epoch = speeds, -1

    def expected(self, request, fleet):
        epoch = math.floor(fleet.now_s / 0.1)
        if epoch > self.epoch:
            self.queues, self.epoch = fleet.waiting.tolist(), epoch
        waits = np.where(fleet.eligible, np.divide(self.queues, self.speeds), np.inf)
        return {int(waits.argmin())}


def test_latency_aware_takes_the_least_queue_over_speed():
    speeds = [4.0, 2.0, 1.5, 1.0]
    chosen = check(LatencyAware(speeds), LeastWait(speeds), fleet(), trace(rate_rps=40.0))
    assert len(set(chosen.tolist())) == 4


def test_static_baselines_keep_their_shares():
    deployment, served = fleet(), trace(6000, 2000.0)
    nodes = simulate(deployment, served, CapacityProportional()).requests["node"]
    memory = np.array([80, 80, 80, 48])
    assert np.bincount(nodes) / 6000 == pytest.approx(memory / memory.sum(), abs=0.02)
    nodes = simulate(deployment, served, LengthAware(threshold_tokens=500)).requests["node"]
    long = served.input_tokens > 500
    for mask, column in ((~long, 2), (long, 0)):
        weight = np.array([FIGURES[g][column] for g in ORDER])
        assert np.bincount(nodes[mask]) / mask.sum() == pytest.approx(
            weight / weight.sum(), abs=0.03
        )
    nodes = simulate(deployment, served, LengthAware(500, exclusive=True)).requests["node"]
    assert set(nodes[long].tolist()) == {0}
