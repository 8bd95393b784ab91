"""An engine without a profile becomes known while it serves, and gets its share of requests."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest
from ruamel.yaml import YAML

from hetero.latency import storage
from hetero.latency.step import StepModel
from tests.live.test_serving_faults import QUICK, ask, client_of
from tests.serving import Paced, Served, running, wait_until


@pytest.mark.parametrize("learn", [True, False])
def test_routing_follows_what_is_learnt_of_an_engine(tmp_path, learn):
    fast, slow = (
        StepModel.affine(floor_s=x, per_token_s=x / 200, per_cached_token_s=0.0)
        for x in (0.2, 1.2)  # slow beside what it takes a busy machine to send 24 requests
    )
    storage.save(slow, tmp_path / "slow.json")
    storage.save(fast, tmp_path / "fast.json")
    engines = {name: Paced(steps=tmp_path / f"{name}.json") for name in ("fast", "slow")}
    served = Served(tmp_path, {name: one.url for name, one in engines.items()}, limits=QUICK)
    text = YAML(typ="safe").load(served.file.read_text())
    text |= {"learn": learn, "router": "hetero"}
    text["backends"][0]["step"] = "fast.json"
    del text["backends"][1]["step"]

    async def send(words, enough):
        async with client_of(served) as client:
            asked = [asyncio.create_task(ask(client, words)) for _ in range(24)]
            while not enough() and not all(one.done() for one in asked):
                await asyncio.sleep(0.1)
            for one in asked:
                one.cancel()
            return await asyncio.gather(*asked, return_exceptions=True)

    def share():
        """Of the slow engine, of 24 requests at once that are cancelled before any has ended."""
        before = {name: one.counts()["begun"] for name, one in engines.items()}

        def begun(*names):
            return sum(engines[name].counts()["begun"] - before[name] for name in names)

        for end in asyncio.run(send(200, lambda: begun("fast", "slow") == 24)):
            assert isinstance(end, asyncio.CancelledError)
        wait_until(lambda: served.metrics()["hetero_in_flight"] == 0)
        return begun("slow") / 24

    served.file.write_text(json.dumps(text))  # which is YAML too
    with running(*engines.values(), served):
        assert share() > 0.3
        assert asyncio.run(send(8, lambda: False)) == [("whole", 8)] * 24
        wait_until(lambda: served.metrics().get('hetero_engine_step_ratio{engine="slow"}', 0) > 2)
        assert served.metrics()['hetero_engine_refits_total{engine="slow"}'] == learn
        if not learn:
            return
        assert share() < 0.25
        # What was learnt outlives the file that is read again, as long as it tells the same.
        served.signal(signal.SIGHUP)
        wait_until(lambda: "serving with 2 engines" in served.log.read_text())
        assert share() < 0.25
        text["backends"][1]["step"] = "fast.json"
        text["backends"][0]["step"] = "slow.json"
        served.file.write_text(json.dumps(text))
        served.signal(signal.SIGHUP)
        wait_until(lambda: served.log.read_text().count("serving with 2 engines") == 2)
        assert share() > 0.6
    assert "slow: steps learnt from" in served.log.read_text()
