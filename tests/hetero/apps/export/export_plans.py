"""Services of every shape, for the tests of the exporters."""

from __future__ import annotations

from dataclasses import replace

from hetero import catalog
from hetero.apps.export import Part, ServedEngine, Service
from hetero.apps.export.service import placed
from hetero.cluster import Cluster, Machine
from hetero.deployment import Deployment, Engine, KvLink
from hetero.engines import EngineSpec, replicated
from hetero.routers import PairShares, Predictive

LLAMA = catalog.llm("Llama-3.1-70B")
SMALL = catalog.llm("Llama-3-8B")


def whole(router=None, engine=None) -> Service:
    """Replicas of one model on two kinds of GPU."""
    fleet = Cluster(
        "two-kinds",
        (
            Machine("v100", catalog.gpu("V100-SXM2-32GB"), 8),
            Machine("a100", catalog.gpu("A100-SXM-80GB")),
        ),
    )
    plan = replicated(
        fleet,
        SMALL,
        {"v100": (4, 2, 2), "a100": 1},
        EngineSpec(
            rules=engine or Engine(batching="chunked", admission="paged", max_step_tokens=2048),
            memory_fraction=0.9,
            overhead_gib=2.0,
        ),
    )
    return Service.of_deployment(
        plan, SMALL, router or Predictive(), weights="meta-llama/Meta-Llama-3-8B"
    )


def split() -> Service:
    """Prefill on one kind of GPU, decode on another."""
    plan = whole().deployment
    assert plan is not None
    roles = ("prefill", "decode", "decode", "decode")
    replicas = tuple(
        replace(one, name=name, role=role)  # type: ignore[arg-type]
        for one, role, name in zip(plan.replicas, roles, "pabc", strict=False)
    )
    pairs = PairShares({("p", "a"): 3.0, ("p", "b"): 1.0})
    plan = Deployment("split", replicas, default_link=KvLink(10.0))
    return Service.of_deployment(plan, SMALL, pairs, weights="meta-llama/Meta-Llama-3-8B")


def pipeline(*parts: tuple[str, str, int, int], copies: int = 1) -> Service:
    """Engines over several machines; by default two of H100 with uneven layers."""
    parts = parts or (("n1", "H100-SXM", 8, 42), ("n2", "H100-SXM", 8, 38))
    servings = [
        ServedEngine(f"pipe-{k}", "both", tuple(Part(f"{m}-{k}", *rest) for m, *rest in parts))
        for k in range(copies)
    ]
    return Service("test", LLAMA, placed(servings), weights="meta-llama/Llama-3.1-70B-Instruct")


def prefill_pipeline() -> Service:
    """Prefill in a pipeline that pushes its caches to a decode engine of one stage."""
    servings = [
        ServedEngine("p", "prefill", (Part("m", "L4", 2, 20), Part("m", "L4", 2, 12))),
        ServedEngine("d", "decode", (Part("n", "L4", 4, 32),)),
    ]
    return Service("pushed", SMALL, placed(servings), weights="meta-llama/Meta-Llama-3-8B")


def within_machines() -> Service:
    """Two machines, in each of which a prefill engine hands its caches to two that decode."""
    servings = [
        ServedEngine(f"{m}-{phase}{k}", phase, (Part(m, "L4", gpus, 32),))
        for m in ("m", "n")
        for phase, gpus, count in (("prefill", 2, 1), ("decode", 1, 2))
        for k in range(count)
    ]
    return Service("apart", SMALL, placed(servings), weights="meta-llama/Meta-Llama-3-8B")


def on(gpu: str, **how: str) -> Service:
    """Two engines of two GPUs of a type on one machine."""
    engine = Engine(batching="chunked", admission="paged", max_step_tokens=2048)
    servings = [
        ServedEngine(f"e{k}", "both", (Part("m", gpu, 2, 32),), engine=engine, kv_tokens=50_000)
        for k in range(2)
    ]
    return Service("one kind", SMALL, placed(servings), weights="meta-llama/Meta-Llama-3-8B", **how)


def closed(*required: str, **properties: object) -> dict[str, object]:
    """Schema of an object that holds these properties and no others."""
    found = {"type": "object", "additionalProperties": False, "properties": properties}
    return found | ({"required": [*required]} if required else {})


EVERY = {
    "AMD": on("MI300X"),
    "AMD, fp8": on("MI355X", precision="fp8", kv_precision="fp8"),
    "Gaudi": on("Gaudi3", precision="bf16"),
    "Intel": on("Arc-Pro-B60"),
    "prefill pipeline": prefill_pipeline(),
    "whole": whole(),
    "prefill first": whole(engine=Engine(max_batch=64)),
    "split": split(),
    "split within machines": within_machines(),
    "pipeline": pipeline(copies=2),
    "stages on one machine": pipeline(("n", "L4", 2, 40), ("n", "L4", 2, 40)),
    "fp8": replace(whole(), precision="fp8", kv_precision="fp8"),
    "int8": replace(whole(), precision="int8"),
    "int4": replace(whole(), precision="int4"),
    "mixed pipeline": pipeline(("n1", "H100-SXM", 4, 50), ("n2", "A100-SXM-80GB", 4, 30)),
}
