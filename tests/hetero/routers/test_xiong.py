"""Algorithm 2 and eq. 5 to 8 of Xiong et al. against a plain re-implementation."""

from __future__ import annotations

import math

import pytest

from hetero.latency.models.affine import Affine
from hetero.routers import Normal, Workload
from hetero.routers.xiong import HEADER, WIDTH, batch_share_s, profile
from tests.hetero.routers.router_states import check, fleet, near, trace

FITS = [
    Affine(3e-5 * k, 1e-4 * k, 2e-6 * k, 4e-3 * k, 2e-7 * k, 2e-4 * k, 3e-7 * k, 8e-3 * k)
    for k in (1.0, 2.0, 2.5, 4.0)
]


def share_s(fit, capacity, inputs, outputs):
    """Eq. 5 and 6 summed step by step as eq. 4 prints it."""
    b = capacity / (inputs + outputs)
    prefill = fit.per_batch_token_s * b * inputs + fit.per_request_s * b
    prefill += fit.per_longest_token_s * inputs + fit.prefill_s
    decode = 0.0
    for k in range(1, outputs + 1):
        decode += fit.per_cached_token_s * b * (inputs + k) + fit.per_decoding_s * b
        decode += fit.per_context_token_s * (inputs + k) + fit.decode_s
    return (prefill + decode) / b


class Algorithm2:
    """Lists of loads and running lengths, updated by hooks, as the paper has them."""

    def __init__(self, deployment, theta, memory_based, ties):
        self.capacity = [r.kv_tokens for r in deployment.replicas]
        self.loads = [0.0] * len(self.capacity)
        self.lengths = [0] * len(self.capacity)
        self.theta, self.memory_based, self.ties = theta, memory_based, ties
        self.sent = {}

    def expected(self, request, fleet):
        self.weights = []
        for fit, capacity, length in zip(FITS, self.capacity, self.lengths, strict=True):
            time = share_s(fit, capacity, request.input_tokens, request.predicted_tokens)
            time = 1.0 if self.memory_based else time
            self.weights.append(time * math.exp(self.theta * length / capacity))
        worst = {}
        for s, weight in enumerate(self.weights):
            if fleet.eligible[s]:
                after = list(self.loads)
                after[s] += weight
                worst[s] = max(after)
        tied = near(worst, min(worst.values()))
        if self.ties == "first":
            return tied if len(tied) == 1 else {min(tied)}
        own = {s: self.loads[s] + self.weights[s] for s in tied}
        return near(own, min(own.values()))

    def dispatched(self, request, s):
        size = request.input_tokens + request.predicted_tokens
        self.sent[request.index] = (s, self.weights[s], size)
        self.loads[s] += self.weights[s]
        self.lengths[s] += size

    def finished(self, index):
        s, weight, size = self.sent.pop(index)
        self.loads[s] -= weight
        self.lengths[s] -= size


@pytest.mark.parametrize("ties", ["least", "first"])
@pytest.mark.parametrize(
    ("theta", "memory_based", "kv_bytes"),
    [(2.0, False, None), (0.5, False, None), (2.0, True, None), (2.0, False, 4.0)],
)
def test_every_decision_is_that_of_algorithm_2(theta, memory_based, kv_bytes, ties):
    deployment = fleet()
    router = Workload(theta, memory_based, ties, FITS, kv_bytes)
    reference = Algorithm2(deployment, theta, memory_based, ties)
    if kv_bytes:  # as many tokens fewer as each has more bytes
        reference.capacity = [
            r.kv_tokens * r.kv_bytes_per_token / kv_bytes for r in deployment.replicas
        ]
    chosen = check(router, reference, deployment, trace(), predictor=Normal(), seed=3)
    assert len(set(chosen.tolist())) == 4


def test_time_of_a_request_in_a_batch_of_its_like():
    memory = Workload(coefficients=FITS).memory(fleet())
    for i, inputs, outputs in [(0, 100, 50), (3, 1, 1), (2, 3000, 700)]:
        got = batch_share_s(memory, i, 9000.0, float(inputs), float(outputs))
        assert got == pytest.approx(share_s(FITS[i], 9000.0, inputs, outputs), rel=1e-12)
    assert len(memory) == HEADER + WIDTH * 4


def test_profiler_recovers_an_affine_instance():
    replica = fleet().replicas[1]
    fit = profile(replica)
    assert float(fit.prefill_batch_s(4, 512)) == pytest.approx(
        float(replica.step.prefill_seconds([512] * 4)), rel=0.05
    )
    assert float(fit.decode_step_s(16, 800)) == pytest.approx(
        float(replica.step.decode_seconds([800] * 16)), rel=0.05
    )
