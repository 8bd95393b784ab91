"""Light rescheduling in service: engines are lost and come back, the plan and the traffic follow.

The engines are processes that stream words at a set pace; they are really killed.
"""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from hetero.apps.serving.plan import FleetPlan
from hetero.apps.serving.written import write
from hetero.deployment import Deployment, Replica
from hetero.latency.step import StepModel
from tests.live.test_serving_faults import QUICK, ask, client_of
from tests.serving import Paced, Served, get, running, wait_until


def planned(paces):
    return Deployment(
        "planned",
        tuple(
            Replica(
                name,
                StepModel.affine(floor_s=pace, per_token_s=pace / 100, per_cached_token_s=0.0),
                kv_tokens=20_000,
            )
            for name, pace in paces.items()
        ),
    )


def test_a_lost_engine_is_planned_without_and_again_when_it_is_back(tmp_path):
    paces = {"fast": 0.01, "middle": 0.02, "slow": 0.04}
    engines = {name: Paced(step_ms=5) for name in paces}
    served = Served(tmp_path, {name: one.url for name, one in engines.items()})
    weighted = {"name": "weighted-round-robin", "weights": "planned"}

    def plan():
        found = json.loads(get(f"{served.url}/plan"))
        return found, {one["name"]: one["share"] for one in found["engines"]}

    async def send(count, words=3):
        async with client_of(served) as client:
            return await asyncio.gather(*(ask(client, words) for _ in range(count)))

    def counts():
        return {name: one.counts()["finished"] for name, one in engines.items()}

    write(
        planned(paces),
        served.file,
        model="m",
        router=weighted,
        urls={name: one.url for name, one in engines.items()},
        limits=QUICK,
        force=True,
    )
    with running(*engines.values(), served):
        found, shares = plan()
        assert shares == pytest.approx({"fast": 4 / 7, "middle": 2 / 7, "slow": 1 / 7}, abs=1e-3)
        whole_rps = found["capacity_rps"]
        assert asyncio.run(send(28)) == [("whole", 3)] * 28
        assert counts() == {"fast": 16, "middle": 8, "slow": 4}
        # The plan was made for long requests and follows the short ones that came.
        wait_until(lambda: plan()[0]["mean_output_tokens"] == 3)
        assert plan()[0]["why"] == "requests of 2 + 3 tokens"
        assert plan()[0]["capacity_rps"] > 5 * whole_rps
        assert served.metrics()['hetero_plan_mends_total{cause="lengths"}'] == 1

        engines["fast"].signal(signal.SIGKILL)
        wait_until(lambda: not served.up()["fast"])
        found, shares = plan()
        assert shares == pytest.approx({"fast": 0, "middle": 2 / 3, "slow": 1 / 3}, abs=1e-3)
        metrics = served.metrics()
        assert metrics['hetero_plan_mends_total{cause="engines"}'] == 1
        assert metrics['hetero_engine_share{engine="middle"}'] == pytest.approx(2 / 3, abs=1e-3)
        assert metrics["hetero_plan_capacity_rps"] == pytest.approx(found["capacity_rps"], rel=1e-3)

        before = {name: engines[name].counts()["finished"] for name in ("middle", "slow")}
        assert asyncio.run(send(12)) == [("whole", 3)] * 12
        after = {name: engines[name].counts()["finished"] for name in before}
        assert {name: after[name] - before[name] for name in before} == {"middle": 8, "slow": 4}

        engines["fast"].start()
        wait_until(lambda: served.up()["fast"])
        found, shares = plan()
        assert shares == pytest.approx({"fast": 4 / 7, "middle": 2 / 7, "slow": 1 / 7}, abs=1e-3)
        assert asyncio.run(send(28)) == [("whole", 3)] * 28
        assert engines["fast"].counts()["finished"] == 16
        assert served.outcomes() == {"finished": 68, "failed": 0, "cancelled": 0, "refused": 0}
    log = served.log.read_text()
    assert "plan mended, fast is out" in log
    assert "middle 67 %, slow 33 %" in log
    assert "plan mended, fast is back" in log


def test_where_no_engine_is_up_there_are_no_shares_but_weights():
    paces = {"a": 0.011, "b": 0.023, "c": 0.047}
    nothing = FleetPlan.of(planned(paces), 300.0, 60.0, up=(False,) * 3)
    assert nothing.shares == (0.0, 0.0, 0.0)
    assert nothing.weights == nothing.capacities_rps
