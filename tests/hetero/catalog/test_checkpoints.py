"""What checkpoints weigh by what they state, by their tensors, and as a hub has them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hetero import paths
from hetero.catalog import Llm, find_llm, llm
from hetero.errors import DataError, ParameterError
from tests.hetero.catalog.test_catalog import CONFIGS

QWEN = CONFIGS["Qwen3-32B"]
ENDS = 2 * 151936 * 5120  # embedding and head, which stay in 16 bits
GIB = 2**30


def quantised(**own: object) -> Llm:
    return Llm.from_config(QWEN | {"quantization_config": own}, name="q")


def packed(bits: int, **more: int) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int"} | more
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}


@pytest.mark.parametrize(
    ("own", "precision", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8.002),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4", 4.156),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", 4 + 20 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int4", 8 + 24 / 128),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4", 4.5),
        (packed(8) | {"ignore": ["lm_head"]}, "int8", 8.004),
        (packed(4, group_size=128), "int4", 4.125),
    ],
)
def test_a_configuration_states_its_weights(own, precision, bits) -> None:
    model = quantised(**own)
    assert model.precision == model.loaded_as("") == precision
    layers = model.params - ENDS
    assert model.weight_bytes(precision) == pytest.approx(2 * ENDS + layers * bits / 8, rel=1e-3)
    # Another data type is that of another checkpoint of the same shape.
    assert model.weight_bytes("fp16") == 2 * model.params


def test_modules_left_in_16_bits_count_by_their_parameters() -> None:
    mlp = 64 * 3 * 5120 * 25600
    attention = sum(64 * n for n in llm("Qwen3-32B").attention_products().values())
    rules: list[tuple[list[str], float]] = [
        (["lm_head"], 0),
        (["model.layers.*.self_attn"], attention),
        (["re:.*self_attn.*", "lm_head"], attention),
        (["re:.*mlp\\.(gate|up|gate_up|down)_proj.*"], mlp),
        ([f"model.layers.{k}.mlp.down_proj" for k in range(32)], mlp / 6),
        (["model.layers.0*"], (attention + mlp) / 64),
        (["language_model.model.layers.1.self_attn*"], attention / 64),
    ]
    whole = quantised(quant_method="fp8").weight_bytes("fp8")
    for left, params in rules:
        model = quantised(quant_method="fp8", modules_to_not_convert=left)
        more = model.weight_bytes("fp8") - whole
        assert more == pytest.approx(params * (16 - 8.002) / 8, rel=1e-6, abs=2), left
    with pytest.raises(DataError, match=r"'re:\(a\+\)\+'.*is not read"):
        quantised(quant_method="fp8", ignore=["re:(a+)+"])


def test_layers_of_several_types_are_told_by_name(tmp_path: Path) -> None:
    algos = {f"model.layers.{k}.mlp": {"quant_algo": "NVFP4"} for k in range(64)}
    algos |= {f"model.layers.{k}.self_attn": {"quant_algo": "FP8"} for k in range(64)}
    told = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": algos}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    model = find_llm(tmp_path)
    assert model.weights is not None
    assert (model.precision, model.weights.dense) == ("fp4", 4.5)
    assert model.weights.attention == pytest.approx(8.002)


def test_published_formats_of_a_catalog_model() -> None:
    model = llm("Qwen2.5-32B")
    # An engine prints 18.14 GiB (engine_memory, row 11).
    assert model.weight_bytes("int4") / GIB == pytest.approx(18.14, rel=0.015)
    assert [model.loaded_as(p) for p in ("", "awq", "nvfp4", "w8a8")] == [
        "fp16", "int4", "fp4", "int8",
    ]  # fmt: skip
    with pytest.raises(ParameterError, match="not published in mxfp4"):
        model.loaded_as("mxfp4")
    assert llm("gpt-oss-20b").loaded_as("mxfp4") == "fp16"


@pytest.mark.parametrize(
    ("name", "shape", "precision"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B", "fp16"),
        ("Qwen/Qwen2.5-32B-Instruct-AWQ", "Qwen2.5-32B", "int4"),
        ("Qwen3-32B-FP8", "Qwen3-32B", "fp8"),
        ("Llama-2-7b-chat-hf", "Llama-2-7B", "fp16"),
        ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3", "fp8"),
        ("openai/gpt-oss-20b", "gpt-oss-20b", "fp16"),
    ],
)
def test_names_with_more_behind_them_find_their_model(name, shape, precision) -> None:
    found = find_llm(name)
    assert (found.params, found.precision) == (llm(shape).params, precision)
    assert find_llm(found.name) == found


def safetensors(path: Path, tensors: dict[str, int]) -> None:
    header, at = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)  # what weighs is not read


def test_the_tensors_of_a_folder_say_what_it_weighs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    index = {"metadata": {"total_size": 70 * GIB}, "weight_map": {"a": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_llm(tmp_path).weight_bytes() == 70 * GIB
    # Headers count before the index; a layer that predicts ahead is not loaded.
    tensors = {"model.embed": 3 * GIB, "visual.x": GIB, "model.layers.64.x": GIB, "mtp.y": GIB}
    safetensors(tmp_path / "x.safetensors", tensors)
    model = find_llm(tmp_path)
    assert model.weight_bytes() == 4 * GIB
    assert model.weight_bytes("fp8") == llm("Qwen3-32B").weight_bytes("fp8")
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(DataError, match="no header of tensors"):
        find_llm(tmp_path)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub of one model beside a gated one; answers are of the public hub's shape."""
    asked: list[str] = []
    kept = {"config.json": QWEN, "model.safetensors.index.json": {"metadata": {}}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            owner, file = self.path.split("/")[1], self.path.split("/")[-1]
            gated = owner == "gated" and self.headers["Authorization"] != "Bearer open"
            there = file in kept and owner != "none"
            self.send_response(401 if gated else 200 if there else 404)
            self.end_headers()
            if there and not gated:
                self.wfile.write(json.dumps(kept[file]).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(paths, "raw", lambda: tmp_path)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield asked
    server.shutdown()


def test_a_model_of_the_hub_is_read_once(hub, monkeypatch) -> None:
    found = find_llm("somebody/Their-32B")
    assert (found.name, found.params) == ("Their-32B", llm("Qwen3-32B").params)
    seen = len(hub)
    assert seen == 3
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert find_llm("somebody/Their-32B") == found
    assert len(hub) == seen


def test_what_keeps_a_hub_from_answering_is_said(hub, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"licence accepted.*HF_TOKEN"):
        find_llm("gated/model")
    monkeypatch.setenv("HF_TOKEN", "open")
    assert find_llm("gated/model").params
    with pytest.raises(DataError, match=r"no config.json.*check the name"):
        find_llm("none/model")
    monkeypatch.setattr("hetero.catalog.checkpoints._MOST_BYTES", 10)
    with pytest.raises(DataError, match="larger than any known"):
        find_llm("big/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be reached.*go online"):
        find_llm("far/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        find_llm("far/model")
