"""A plan card with every section, and a deployment file beside its step model, for the fuzzer."""

from __future__ import annotations

from dataclasses import asdict

from hetero import catalog
from hetero.apps.cards.card import (
    CardQuestion,
    ChangeEffect,
    GoodputBound,
    Limit,
    Limits,
    PlanCard,
    Replicas,
    Sampled,
    Source,
    TriedPlanner,
)
from hetero.deployment import Deployment, Engine, Replica
from hetero.latency.step import StepModel
from hetero.plans import Group, Plan
from hetero.routers import WeightedRoundRobin

_FIGURE = Sampled(2.0, (1.9, 2.1), (1.5, 2.5, 2.0))
_ENGINE = Engine(batching="chunked", admission="paged", max_batch=64, max_step_tokens=1024)
_STEP = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
_PLACES = {"r0": ("m1", "L4", 2), "r1": ("m2", "L4", 2), "s": ("m3", "A10", 1)}
PLAN = Plan(
    planner="search",
    groups=tuple(
        Group(name, "both", ((*place, 32),), share)
        for (name, place), share in zip(_PLACES.items(), (0.4, 0.4, 0.2), strict=True)
    ),
    serving=Deployment(
        "by hand",
        tuple(
            Replica(name, _STEP, 70_000, engine=_ENGINE, gpu=catalog.gpu(gpu), gpus=gpus)
            for name, (_, gpu, gpus) in _PLACES.items()
        ),
    ),
    router=WeightedRoundRobin((2.0, 2.0, 1.0)),
    routing="hetero",
    usd_per_h=3.5,
    options={"theta": 2.0},
)
CARD = PlanCard(
    question=CardQuestion(
        "fleet", {"L4": 4, "A10": 1}, "Llama-3-8B", "azure2023_conv", 1.0, True,
        {"ttft": 0.5, "tpot": 0.05}, 0.9, None, "fp16", "nominal", 0, 100,
    ),
    planner="search",
    precision="fp16",
    groups=(
        Replicas(
            2, {"L4": 2}, "TP 2", "both", 0.8, ("r0", "r1"),
            ((("m1", "L4", 2, 32),), (("m2", "L4", 2, 32),)),
            {**asdict(_ENGINE), "kv_tokens": 70_000},
        ),
        Replicas(1, {"A10": 1}, "TP 1", "both", 0.2, ("s",), ((("m3", "A10", 1, 32),),)),
    ),
    idle={"L4": 0},
    routing="hetero",
    goodput_rps=_FIGURE,
    served={"requests_per_s": _FIGURE, "total_tps": Sampled(900.0, (890.0, 910.0))},
    latencies_s={name: {50: _FIGURE, 90: _FIGURE} for name in ("ttft", "tpot", "e2e")},
    usd_per_h=3.5,
    usd_per_mtok=_FIGURE,
    bound=GoodputBound(4.0, "the flow of tokens", 50.0),
    limits=Limits("memory", "Memory binds.", "ttft", (Limit("memory", 3.0),)),
    changes=(ChangeEffect("one more L4", _FIGURE, Sampled(0.1, (0.1,)), 4.0, "hetero plan"),),
    tried=(
        TriedPlanner("search", "fp16", 2.0, 3.5, 4.0, ""),
        TriedPlanner("other", "fp16", 1.0, None, None, ""),
    ),
    sources=(
        Source("L4", 4, "roofline of the data sheet", 20.0, 10.0, "NVIDIA", 0.7, "catalog"),
        Source("A10", 1, "roofline of the data sheet", 20.0, 10.0, "NVIDIA", None, ""),
    ),
    plan=PLAN,
    notes=("A note.",),
)  # fmt: skip

DEPLOYMENT = {
    "model": "org/model",
    "router": {"name": "workload", "theta": 3},
    "host": "127.0.0.1",
    "port": 8000,
    "seed": 1,
    "limits": {"max_requests": 64, "token_s": 5.0, "retries": 1},
    "outputs": "allowed",
    "backends": [
        {
            "name": "a",
            "url": "http://127.0.0.1:1/v1",
            "step": "step.json",
            "kv_tokens": 1000,
            "gpu": "L4",
        },
        {
            "name": "b",
            "url": "http://127.0.0.1:2",
            "step": "step.json",
            "kv_tokens": 500,
            "max_batch": 4,
            "max_step_tokens": 512,
            "block_tokens": 16,
            "gpu": {"name": "own", "fp16_tflops": 100.0, "mem_gib": 24.0, "mem_bw_gbs": 300.0},
            "gpus": 2,
            "usd_per_h": 1.5,
        },
    ],
}
