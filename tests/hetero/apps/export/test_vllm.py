from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace

import pytest

from hetero.apps.export import Part, ServedEngine, Service, files, vllm
from hetero.apps.export.service import placed
from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.errors import ExportError
from hetero.latency.step import StepModel
from hetero.plans import Group, Plan
from hetero.routers import PairShares
from tests.hetero.apps.export.export_plans import EVERY, LLAMA, SMALL, on, pipeline, split, whole

# Flags of `vllm serve --help=all` of release 0.33, with what they take.
FLAGS = {
    **dict.fromkeys(["served-model-name", "host", "master-addr"], str),
    **dict.fromkeys(["port", "tensor-parallel-size", "pipeline-parallel-size", "nnodes"], int),
    **dict.fromkeys(["data-parallel-size", "node-rank", "master-port", "max-num-seqs"], int),
    **dict.fromkeys(["max-num-batched-tokens", "max-model-len"], int),
    **dict.fromkeys(["enable-expert-parallel", "headless", "enable-chunked-prefill"]),
    **dict.fromkeys(["no-enable-chunked-prefill", "enable-prefix-caching"]),
    **dict.fromkeys(["no-enable-prefix-caching", "no-async-scheduling"]),
    "dtype": {"auto", "half", "float16", "bfloat16", "float", "float32"},
    "quantization": {"fp8", "int8_per_channel_weight_only"},
    "kv-cache-dtype": {"auto", "bfloat16", "fp8"},
    "gpu-memory-utilization": float,
    "kv-transfer-config": json.loads,
}


def flags(argv):
    """Flags and values of a command, checked against the documented ones."""
    assert argv[:2] == ("vllm", "serve")
    words, found = list(argv[3:]), {}
    while words:
        flag = words.pop(0)
        kind = FLAGS[flag.removeprefix("--")]
        assert flag not in found
        found[flag] = True if kind is None else words.pop(0)
        assert not isinstance(kind, set) or found[flag] in kind
        if kind is not None and not isinstance(kind, set):
            found[flag] = kind(found[flag])
    return found


@pytest.mark.parametrize("name", list(EVERY))
def test_every_command_has_documented_flags_only(name):
    service = EVERY[name]
    for serving in service.servings:
        for command in vllm.commands(service, serving):
            found = flags(command.argv)
            assert found["--served-model-name"] == service.llm.name
            assert found["--max-model-len"] <= service.llm.max_position


def test_engines_of_one_machine_share_no_gpu_and_no_port():
    service = pipeline(("n", "L4", 2, 80))
    llm = service.llm
    parts = [ServedEngine(f"e{k}", "both", (Part("n", "L4", 2, 80),)) for k in range(3)]
    found = Service("one", llm, placed(parts))
    commands = [vllm.commands(found, one)[0] for one in found.servings]
    assert [dict(one.env)["CUDA_VISIBLE_DEVICES"] for one in commands] == ["0,1", "2,3", "4,5"]
    assert [flags(one.argv)["--port"] for one in commands] == [8000, 8001, 8002]
    other = ServedEngine("other", "both", (Part("n", "L4", 1, 40), Part("m", "L4", 1, 40)))
    beside = Service("other", llm, placed([other])).beside([found])
    assert [part.first_gpu for part in beside.servings[0].parts] == [6, 0]
    assert beside.servings[0].port == 8003


def test_uneven_layers_over_two_machines():
    service = pipeline()
    head, worker = vllm.commands(service, service.servings[0])
    for rank, command in enumerate((head, worker)):
        found = flags(command.argv)
        assert (found["--nnodes"], found["--node-rank"]) == (2, rank)
        assert found["--master-addr"] == "n1-0"
        assert found["--tensor-parallel-size"] * found["--pipeline-parallel-size"] == 16
        assert dict(command.env)["VLLM_PP_LAYER_PARTITION"] == "42,38"
        assert found.get("--headless", False) is bool(rank)
        assert ("--port" in found) is not bool(rank)


def test_prefill_pipelines_push_their_caches_and_decode_has_one_stage():
    def of(prefill, decode):
        phases = (("p", "prefill", prefill), ("d", "decode", decode))
        servings = [
            ServedEngine(name, phase, tuple(Part(name, "L4", 2, 80 // n) for _ in range(n)))
            for name, phase, n in phases
        ]
        return Service("split", LLAMA, placed(servings))

    def transfers(service):
        found = [flags(vllm.commands(service, one)[0].argv) for one in service.servings]
        return [one["--kv-transfer-config"] for one in found]

    roles = ("kv_producer", "kv_consumer", "kv_consumer", "kv_consumer")
    pulled = [{"kv_connector": "NixlConnector", "kv_role": role} for role in roles]
    assert transfers(split()) == pulled
    assert transfers(of(1, 1)) == pulled[:2]
    assert {one["kv_connector"] for one in transfers(of(2, 1))} == {"NixlPushConnector"}
    with pytest.raises(ExportError, match="decode alone in 2 pipeline stages"):
        vllm.scripts(of(1, 2))


@pytest.mark.parametrize(
    ("service", "says"),
    [
        (replace(whole(), weights=""), "name the checkpoint with --weights"),
        (whole(), "not built for V100"),
        (on("Gaudi3"), "releases of its own"),
    ],
)
def test_what_a_plan_leaves_open_or_an_image_lacks_is_a_note(service, says):
    notes = " ".join(vllm.notes(service, service.servings[0]))
    assert says in notes
    assert ("--weights" in notes) is ("--weights" in says)


def test_engine_and_memory_come_from_the_plan():
    engine = Engine(batching="chunked", admission="paged", max_batch=48, max_step_tokens=1024)
    service = whole(engine=engine)
    serving = service.servings[0]
    found = flags(vllm.commands(service, serving)[0].argv)
    assert (found["--max-num-seqs"], found["--max-num-batched-tokens"]) == (48, 1024)
    assert found["--max-model-len"] == min(SMALL.max_position, serving.sure_tokens)
    assert found["--no-enable-prefix-caching"]
    assert found["--no-async-scheduling"]
    # No more than is asked for, nor than is there where the estimate is high.
    for asked, error, least in ((900, 0.0, 900), (0, 100.0, 1800), (0, 1.0, 1980)):
        one = replace(serving, kv_tokens=2000, kv_error_tokens=error)
        words = vllm.arguments(replace(service, longest_tokens=asked), one)
        assert words[words.index("--max-model-len") + 1] == str(least)
    # Prefilling whole prompts, a step takes the longest.
    service = whole(engine=Engine(max_batch=48, max_step_tokens=1024))
    found = flags(vllm.commands(service, service.servings[0])[0].argv)
    assert found["--no-enable-chunked-prefill"]
    assert found["--max-num-batched-tokens"] >= found["--max-model-len"]


def test_precisions():
    def of(precision):
        service = replace(whole(), precision=precision)
        command = vllm.commands(service, service.servings[0])[0]
        return flags(command.argv), " ".join(command.notes)

    assert of("fp16")[0]["--dtype"] == of("bf16")[0]["--dtype"] == "auto"
    assert of("fp32")[0]["--dtype"] == "float32"
    assert of("fp8")[0]["--quantization"] == "fp8"
    found, told = of("int4")
    assert "--quantization" not in found
    assert "quantised" in told


@pytest.mark.parametrize(
    ("service", "says"),
    [
        *(
            (pipeline(*parts), says)
            for parts, says in (
                (
                    (("a", "H100-SXM", 4, 40), ("b", "H100-SXM", 2, 40)),
                    "one tensor-parallel degree",
                ),
                ((("a", "L4", 2, 30), ("b", "L4", 2, 20), ("a", "L4", 2, 30)), "comes back"),
                ((("a", "L4", 1, 30), ("a", "L4", 1, 20), ("b", "L4", 1, 30)), "same number on e"),
                ((("a", "L4", 3, 80),), "64 attention heads"),
            )
        ),
        (whole(engine=Engine(batching="static")), "static batches"),
        (replace(whole(), kv_precision="int4"), "int4"),
        (on("MI300X", precision="int8"), "weights in int8, which vLLM does not serve on MI300X"),
        (on("Gaudi3", precision="fp8"), "weights in fp8, which vLLM does not serve on Gaudi3"),
        (on("Gaudi3", kv_precision="fp8"), "caches keys and values in fp8, which vLLM has no"),
        (on("L40S", engine="sglang"), "is for SGLang, and these are files for vLLM"),
    ],
)
def test_what_vllm_cannot_run_is_said(service, says):
    with pytest.raises(ExportError, match=says):
        vllm.scripts(service)


def test_a_part_of_the_layers_is_no_engine():
    with pytest.raises(ExportError, match="40 of the 80 layers"):
        pipeline(("a", "L4", 1, 40))


def test_islands_without_machines_are_only_routed_to():
    parts = [ServedEngine(f"island {k}", "both", (Part("", "H100-SXM", 16, 80),)) for k in range(2)]
    service = Service("islands", LLAMA, placed(parts))
    assert list(files.addresses(service).values()) == [
        "http://island-0:8000",
        "http://island-1:8000",
    ]
    for target in ("vllm", "kubernetes", "skypilot"):
        with pytest.raises(ExportError, match="wherever they stand"):
            files.TARGETS[target](service, {})


def test_scripts_are_shell(tmp_path):
    for service in EVERY.values():
        for machine, text in vllm.scripts(service).items():
            path = tmp_path / f"{machine}.sh"
            path.write_text(text)
            subprocess.run(["sh", "-n", str(path)], check=True)
            started = [line for line in text.splitlines() if line.endswith(" &")]
            assert len(started) == sum(machine in one.machines for one in service.servings)
            for line in started:
                words = shlex.split(line.removesuffix(" &"))
                assert "vllm" in words


def test_an_entry_of_the_arena():
    place = (("v100", "V100-SXM2-32GB", 4, 80),)
    groups = (Group("g0", "prefill", place, 1.0), Group("g1", "decode", place, 1.0))
    step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    replicas = tuple(Replica(one.name, step, 70_000, role=one.phase) for one in groups)
    made = Deployment("split", replicas, default_link=KvLink(10.0))
    plan = Plan("test", groups, made, PairShares({("g0", "g1"): 1.0}), "pairs", 1.0)
    service = Service.of_plan(plan, LLAMA, name="xiong-8xv100", weights="w")
    assert [one.port for one in service.servings] == [8000, 8001]
    envs = [dict(vllm.commands(service, one)[0].env) for one in service.servings]
    assert envs[1]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert envs[0]["VLLM_NIXL_SIDE_CHANNEL_PORT"] != envs[1]["VLLM_NIXL_SIDE_CHANNEL_PORT"]


@pytest.mark.parametrize(
    ("gpu", "variable"),
    [
        ("L40S", "CUDA_VISIBLE_DEVICES"),
        ("MI300X", "HIP_VISIBLE_DEVICES"),
        ("Arc-Pro-B60", "ZE_AFFINITY_MASK"),
        ("Gaudi3", "HABANA_VISIBLE_MODULES"),
    ],
)
def test_devices_are_named_as_their_vendor_does(gpu, variable):
    service = on(gpu)
    found = [vllm.commands(service, one)[0].env for one in service.servings]
    assert found == [((variable, "0,1"),), ((variable, "2,3"),)]


def test_an_engine_has_data_types_of_its_own():
    service = on("L40S")
    first, second = service.servings
    mixed = replace(service, servings=(replace(first, precision="fp8", kv_precision="fp8"), second))
    found = [flags(vllm.commands(mixed, one)[0].argv) for one in mixed.servings]
    assert [one["--dtype"] for one in found] == ["auto", "auto"]
    assert [one.get("--quantization") for one in found] == ["fp8", None]
    assert [one.get("--kv-cache-dtype") for one in found] == ["fp8", None]
    assert len(mixed.families()) == 2


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        (("Gaudi3", "Gaudi3"), "has no connector that moves KV caches"),
        (("L40S", "MI300X"), "no connector of vLLM moves KV caches there"),
    ],
)
def test_phases_are_not_split_between_vendors_without_a_connector(gpus, says):
    servings = (
        ServedEngine(phase, phase, (Part(phase, gpu, 1, 32),))
        for phase, gpu in zip(("prefill", "decode"), gpus, strict=True)
    )
    service = Service("split", SMALL, placed(servings))
    with pytest.raises(ExportError, match=says):
        vllm.commands(service, service.servings[0])
