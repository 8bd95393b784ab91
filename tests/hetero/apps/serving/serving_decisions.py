"""Decisions of every router over a made-up life of a fleet, to be compared between processes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np

KINDS = ("prefill first", "chunked", "static")


def deployment(rng, count, kinds):
    from hetero import catalog
    from hetero.deployment import Deployment, Engine, Replica
    from hetero.latency.step import StepModel

    def kind(k):
        step = StepModel.affine(
            floor_s=float(rng.uniform(0.005, 0.05)),
            per_token_s=float(rng.uniform(1e-5, 1e-4)),
            per_cached_token_s=float(rng.uniform(1e-8, 1e-6)),
            per_pair_s=float(rng.choice([0.0, 1e-10])),
        )
        batching = KINDS[int(rng.integers(3))]
        engine = Engine(
            batching=batching,
            admission="known" if batching == "static" else "paged",
            max_batch=int(rng.integers(2, 64)),
            max_step_tokens=int(rng.integers(256, 4096)),
        )
        gpu = catalog.gpu(str(rng.choice(["H100-SXM", "L40S", "T4"])))
        memory = {"kv_tokens": int(rng.integers(2_000, 60_000)), "kv_bytes_per_token": 8e5}
        return Replica(f"kind {k}", step, **memory, engine=engine, gpu=gpu)

    made = [kind(k) for k in range(kinds)]
    return Deployment("fleet", tuple(replace(made[k % kinds], name=f"{k}") for k in range(count)))


def life(seed, name, count, kinds, requests):
    """What a router decided, and the credits that it gave."""
    from hetero.apps.serving.records import FleetRecords
    from hetero.engine import state
    from hetero.routers import factories

    rng = np.random.default_rng(seed)
    fleet = deployment(rng, count, kinds)
    maker = factories()[name]
    router = maker(target_s=2.0) if name == "hetero" and seed % 3 == 2 else maker()
    live = router.live(fleet, np.random.default_rng(seed))
    records = FleetRecords(fleet, rows=64)
    up = [True] * count
    now_s = 0.0
    seen, held, begun, fresh = [], [], [], []

    def decide(r):
        able = records.look(r, now_s, up)
        choice = live.decide(records.state, r, now_s) if able else None
        seen.append([choice, float(records._r[r].credit)])
        if able and choice >= 0:
            records.let_go(r)
            records.send(r, choice, now_s)
            fresh.append(r)
            return True
        records.hold(r, deferred=choice == state.DEFER)
        return choice == state.REJECT

    for _ in range(requests):
        now_s += float(rng.exponential(0.4 / count))
        if records.full:
            by = records.compact()
            live.renumber(by)
            held, begun, fresh = ([r - by for r in rows] for rows in (held, begun, fresh))
        r = records.open(int(rng.lognormal(6, 1.3)), int(rng.lognormal(5, 1)), now_s)
        if not decide(r):
            held.append(r)
        for _ in range(int(rng.integers(0, 4))):
            event = rng.random()
            if event < 0.4 and fresh:
                r = fresh.pop(int(rng.integers(len(fresh))))
                records.first_token(r, now_s)
                begun.append(r)
            elif event < 0.7 and begun:
                records.more_tokens(begun[int(rng.integers(len(begun)))], int(rng.integers(1, 5)))
            elif event < 0.95 and begun:
                r = begun.pop(int(rng.integers(len(begun))))
                records.close(r, now_s, int(rng.integers(1, 3000)), int(rng.integers(1, 900)))
            elif event >= 0.97:
                k = int(rng.integers(count))
                up[k] = not up[k]
            while held and decide(held[0]):
                held.pop(0)
    return seen


def lives():
    from hetero.routers import factories

    found = {}
    for name in factories():
        for seed in range(3):
            found[f"{name} {seed}"] = life(seed, name, 4, 2, 150)
    for seed in range(3):
        found[f"hetero of few {seed}"] = life(seed, "hetero", 7, 7, 400)
        found[f"hetero of many {seed}"] = life(seed, "hetero", 64, 3, 500)
    return found


if __name__ == "__main__":
    from hetero.engine.compiled import interpret

    interpret()
    json.dump(lives(), sys.stdout)
    assert "numba" not in sys.modules
