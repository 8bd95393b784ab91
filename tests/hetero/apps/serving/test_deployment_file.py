"""A planned deployment is written so that `hetero serve` reads the same one back."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import pytest

from hetero import catalog, cluster
from hetero.apps.serving import settings
from hetero.apps.serving.deployment_file import write
from hetero.deployment import Deployment, KvLink, Replica
from hetero.engines import replicated
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.routers import (
    HeteroServe,
    LeastTokens,
    PairShares,
    Predictive,
    RoundRobin,
    WeightedRoundRobin,
    Workload,
)

STEP = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)


@pytest.fixture(scope="module")
def planned():
    fleet = cluster.cluster("xiong-v100-a800")
    model = catalog.llm("DeepSeek-R1-Distill-Qwen-14B")
    return replicated(fleet, model, {"v100": 2, "a800": 1})


@pytest.mark.parametrize(
    "router",
    [
        RoundRobin(),
        LeastTokens(),
        WeightedRoundRobin([5, 4, 3, 2, 1]),
        Workload(theta=1.5),
        Workload(memory_based=True, ties="first"),
        HeteroServe(dispatch="proportional", queue_max=16.0),
        Predictive(target_s=2.0),
    ],
    ids=lambda one: one.name,
)
def test_what_a_planner_wrote_is_what_the_dispatcher_reads(planned, router, tmp_path):
    found = write(planned, tmp_path / "deployment.yaml", model="qwen", router=router)
    read = found.deployment()
    assert any(" " in one.name for one in planned.replicas)
    of = attrgetter(
        *("name", "kv_tokens", "kv_bytes_per_token", "gpus", "usd_per_h", "gpu.name"),
        *("gpu.fp16_tflops", "gpu.mem_gib", "gpu.mem_bw_gbs", "engine.max_batch"),
        *("engine.max_step_tokens", "engine.batching", "engine.block_tokens"),
    )
    for ours, theirs in zip(read.replicas, planned.replicas, strict=True):
        assert of(ours) == of(theirs)
        assert ours.step.seconds(300, 7, 4000, 0) == theirs.step.seconds(300, 7, 4000, 0)
    again = found.chosen()
    assert again.name == router.name
    assert np.array_equal(again.memory(read), router.memory(planned))
    ports = [one.url.rpartition(":")[2] for one in found.backends]
    assert ports == [str(8001 + k) for k in range(len(read.replicas))]
    assert settings.load(tmp_path / "deployment.yaml") == found


def test_names_that_differ_only_in_signs_keep_their_own_step_models(tmp_path):
    other = StepModel.affine(floor_s=0.07, per_token_s=1e-4, per_cached_token_s=1e-7)
    both = Deployment("two", (Replica("a b", STEP, 1000), Replica("a+b", other, 1000)))
    found = write(both, tmp_path / "d.yaml", model="m").deployment()
    assert [float(one.step.seconds(1)) for one in found.replicas] == pytest.approx([0.0201, 0.0701])


def test_what_no_dispatcher_can_serve_is_refused_and_leaves_nothing(tmp_path):
    pair = Deployment(
        "pair",
        (Replica("p", STEP, 1000, role="prefill"), Replica("d", STEP, 1000, role="decode")),
        default_link=KvLink(10.0),
    )
    with pytest.raises(ParameterError, match="'p' serves only one phase"):
        write(pair, tmp_path / "d.yaml", model="m")
    one = Deployment("one", (Replica("a", STEP, 1000),))
    with pytest.raises(ParameterError, match="cannot be written"):
        write(one, tmp_path / "d.yaml", model="m", router=PairShares({("a", "a"): 1.0}))
    assert list(tmp_path.iterdir()) == []
    write(one, tmp_path / "d.yaml", model="m")
    with pytest.raises(ParameterError, match="exists already"):
        write(one, tmp_path / "d.yaml", model="m")
