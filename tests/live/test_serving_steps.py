"""An engine without a profile becomes known while it serves, and gets its share of requests."""

from __future__ import annotations

import asyncio
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

    def write():
        with served.file.open("w") as out:
            YAML(typ="safe", pure=True).dump(text, out)

    async def send(count):
        async with client_of(served) as client:
            return await asyncio.gather(*(ask(client, 8) for _ in range(count)))

    def share():
        """Of the slow engine, of 24 requests at once."""
        before = engines["slow"].counts()["begun"]
        assert asyncio.run(send(24)) == [("whole", 8)] * 24
        return (engines["slow"].counts()["begun"] - before) / 24

    write()
    with running(*engines.values(), served):
        assert share() > 0.3
        wait_until(lambda: served.metrics().get('hetero_engine_step_ratio{engine="slow"}', 0) > 2)
        refits = served.metrics()['hetero_engine_refits_total{engine="slow"}']
        assert refits == learn
        if not learn:
            return
        assert share() < 0.3
        # What was learnt outlives the file that is read again, as long as it tells the same.
        served.signal(signal.SIGHUP)
        wait_until(lambda: "serving with 2 engines" in served.log.read_text())
        assert share() < 0.3
        text["backends"][1]["step"] = "fast.json"
        text["backends"][0]["step"] = "slow.json"
        write()
        served.signal(signal.SIGHUP)
        wait_until(lambda: served.log.read_text().count("serving with 2 engines") == 2)
        assert share() > 0.6
    assert "slow: steps learnt from" in served.log.read_text()
