from __future__ import annotations

import itertools

import numpy as np
import pytest

from hetero import catalog, cluster, workload
from hetero.errors import InfeasibleError
from hetero.planners.xiong.tensor_parallel import profiled, roofline_source, search
from hetero.workload import Trace


@pytest.fixture(scope="module")
def sample() -> Trace:
    return workload.load("sharegpt").sample(200, np.random.default_rng(0))


def test_every_divisor_of_every_machine_is_in_the_table(sample: Trace) -> None:
    found = search(cluster.cluster("xiong-v100-a800"), catalog.llm("Llama-3-8B"), sample)
    tried = {(d.machine.name, d.tensor_parallel) for d in found.degrees}
    expected = {
        (machine.name, t)
        for machine in cluster.cluster("xiong-v100-a800").machines
        for t in range(1, machine.count + 1)
        if machine.count % t == 0
    }
    assert tried == expected


def test_best_of_each_machine_is_the_best_combination(sample: Trace) -> None:
    found = search(cluster.cluster("xiong-v100-a800"), catalog.llm("Llama-3-8B"), sample)
    machines = {d.machine.name for d in found.degrees}
    options = [
        [d.system_tps for d in found.degrees if d.machine.name == name and d.estimate]
        for name in sorted(machines)
    ]
    assert found.system_tps == pytest.approx(max(map(sum, itertools.product(*options))))


def test_weights_that_do_not_fit_are_in_the_table_with_the_reason(sample: Trace) -> None:
    found = search(
        cluster.cluster("xiong-8xv100"),
        catalog.llm("DeepSeek-R1-Distill-Qwen-14B"),
        sample,
        require_longest=False,
    )
    # 29.5 GB of weights leave nothing of 0.9 x 32 GiB less 2 GiB.
    first = found.degrees[0]
    assert (first.tensor_parallel, first.estimate) == (1, None)
    assert "weights" in first.reason
    assert [d.tensor_parallel for d in found.degrees if d.estimate] == [2, 4, 8]


def test_model_that_fits_nowhere_says_so_for_each_degree(sample: Trace) -> None:
    with pytest.raises(InfeasibleError, match=r"No machine .* Llama-3.1-405B .*t=8: .*weights"):
        search(cluster.cluster("xiong-8xv100"), catalog.llm("Llama-3.1-405B"), sample)


def test_equation_2_needs_the_longest_input_and_output_together() -> None:
    long = Trace(
        arrival_s=np.zeros(2),
        input_tokens=np.array([90_000, 1], np.int32),
        output_tokens=np.array([1, 90_000], np.int32),
        name="long",
        source="test",
    )
    model, machine = catalog.llm("Llama-3-8B"), cluster.cluster("xiong-8xv100")
    strict = search(machine, model, long)
    assert strict.degrees[0].estimate is None
    assert "180,000" in strict.degrees[0].reason
    lenient = search(machine, model, long, require_longest=False)
    assert lenient.degrees[0].estimate is not None


def test_profile_and_fit_stay_close_to_their_source(sample: Trace) -> None:
    model, machine = catalog.llm("Llama-3-8B"), cluster.cluster("xiong-8xv100")
    direct = search(machine, model, sample, require_longest=False)
    fitted = search(
        machine, model, sample, latency=profiled(roofline_source()), require_longest=False
    )
    for a, b in zip(direct.degrees, fitted.degrees, strict=True):
        assert b.system_tps == pytest.approx(a.system_tps, rel=0.15)
    assert direct.ranking("v100") == fitted.ranking("v100")


def test_faster_link_helps_every_degree_but_the_first(sample: Trace) -> None:
    model, machine = catalog.llm("Llama-3-8B"), cluster.cluster("xiong-8xv100")
    pcie = search(machine, model, sample)
    nvlink = search(machine, model, sample, latency=roofline_source(link=catalog.link("NVLink2")))
    assert nvlink.degrees[0].system_tps == pcie.degrees[0].system_tps
    for slow, fast in zip(pcie.degrees[1:], nvlink.degrees[1:], strict=True):
        assert fast.system_tps > 1.2 * slow.system_tps
