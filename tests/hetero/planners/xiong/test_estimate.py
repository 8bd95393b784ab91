from __future__ import annotations

import numpy as np
import pytest

from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.step import StepModel
from hetero.planners.xiong.estimate import Padded, throughput
from hetero.workload import Trace

STEP = StepModel.affine(floor_s=0.5, per_token_s=0.25, per_cached_token_s=0.125)


def trace(inputs: list[int], outputs: list[int]) -> Trace:
    return Trace(
        arrival_s=np.zeros(len(inputs)),
        input_tokens=np.array(inputs, np.int32),
        output_tokens=np.array(outputs, np.int32),
        name="test",
        source="test",
    )


def test_padded_times_are_the_printed_sums() -> None:
    latency = Padded(STEP)
    assert latency.prefill_batch_s(3, 8) == 0.5 + 0.25 * 24
    # Decode step k reads 3 (8 + k) cached tokens and makes 3 new ones.
    expected = sum(0.5 + 0.25 * 3 + 0.125 * 3 * (8 + k) for k in range(1, 5))
    assert latency.decode_batch_s(3, 8, 4) == pytest.approx(expected, rel=1e-14)


def test_request_that_fits_nowhere_is_reported_not_repeated() -> None:
    estimate = throughput(
        trace([4, 100, 4], [2, 1, 2]),
        Padded(STEP),
        kv_capacity_bytes=30,
        kv_bytes_per_token=1,
        tensor_parallel=1,
        gpus=1,
    )
    assert estimate.too_long == (1,)
    assert [batch.requests for batch in estimate.batches] == [(0, 2)]
    assert "first: request 1" in str(estimate)


def test_throughput_by_hand_and_both_scalings() -> None:
    sample = trace([4, 4], [2, 2])
    by_instances, by_degree = (
        throughput(
            sample,
            Padded(STEP),
            kv_capacity_bytes=1000,
            kv_bytes_per_token=1,
            tensor_parallel=2,
            gpus=8,
            scaling=scaling,
        )
        for scaling in ("instances", "line 17")
    )
    time_s = (0.5 + 0.25 * 8) + sum(0.5 + 0.25 * 2 + 0.125 * 2 * (4 + k) for k in (1, 2))
    assert by_instances.instance_tps == pytest.approx(12 / time_s, rel=1e-14)
    assert by_instances.system_tps == pytest.approx(4 * 12 / time_s, rel=1e-14)
    assert by_degree.system_tps == pytest.approx(2 * 12 / time_s, rel=1e-14)
    assert by_instances.requests_per_s == pytest.approx(4 * 2 / time_s, rel=1e-14)


def test_nothing_fits_names_the_shortest_request() -> None:
    with pytest.raises(InfeasibleError, match="holds 5 tokens and the shortest request needs 6"):
        throughput(
            trace([4, 9], [2, 9]),
            Padded(STEP),
            kv_capacity_bytes=5,
            kv_bytes_per_token=1,
            tensor_parallel=1,
            gpus=1,
        )


@pytest.mark.parametrize("degree", [0, 3])
def test_degree_must_divide_the_gpus(degree: int) -> None:
    with pytest.raises(ParameterError, match=f"divided into instances of {degree}"):
        throughput(
            trace([1], [1]),
            Padded(STEP),
            kv_capacity_bytes=5,
            kv_bytes_per_token=1,
            tensor_parallel=degree,
            gpus=8,
        )
