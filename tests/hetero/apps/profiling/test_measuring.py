"""One measured layer: the right mathematics, and a file that fits take."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hetero import latency
from hetero.apps.profiling import measuring
from hetero.catalog import llm
from hetero.errors import ParameterError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SMALL = dataclasses.replace(
    llm("Llama-3-8B"), hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96
)


def test_the_layer_is_a_llama_layer():
    transformers = pytest.importorskip("transformers", reason="the reference is not installed")
    own = measuring.Layer(SMALL, torch.device("cpu"), torch.float32)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        rms_norm_eps=1e-6,
        vocab_size=8,
    )
    reference = transformers.LlamaModel(config).eval()
    block = reference.layers[0]
    with torch.no_grad():
        block.self_attn.q_proj.weight.copy_(own.qkv[:64])
        block.self_attn.k_proj.weight.copy_(own.qkv[64:96])
        block.self_attn.v_proj.weight.copy_(own.qkv[96:])
        block.self_attn.o_proj.weight.copy_(own.out)
        block.mlp.gate_proj.weight.copy_(own.gate_up[:96])
        block.mlp.up_proj.weight.copy_(own.gate_up[96:])
        block.mlp.down_proj.weight.copy_(own.down)
        reference.norm.weight.fill_(1.0)
        x = torch.randn(2, 10, 64)
        expected = reference(inputs_embeds=x).last_hidden_state
        # The reference ends with the norm of the model.
        found = torch.nn.functional.rms_norm(own(x), (64,), eps=1e-6)
        assert torch.allclose(found, expected, atol=1e-5)

        # The last token decoded on a cache of the others comes out as in the whole prompt.
        shape = (2, 2, 10, 16)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        h = torch.nn.functional.rms_norm(x, (64,), own.norms[0], 1e-6)
        together = torch.nn.functional.linear(h, own.qkv).view(2, 10, 8, 16).transpose(1, 2)
        _, k, v = together.split([4, 2, 2], dim=1)
        keys[:, :, :9] = measuring._rotated(k, 0)[:, :, :9]
        values[:, :, :9] = v[:, :, :9]
        last = own(x[:, 9:], (keys, values))
        assert torch.allclose(last, own(x)[:, 9:], atol=1e-5)


def test_the_table_names_its_device_and_is_read_as_measurements(tmp_path):
    file = tmp_path / "layer.csv"
    found = measuring.measure(
        SMALL, device="cpu", batches=(1, 2, 4), inputs=(8, 64), contexts=(8, 64), repeats=2
    )
    found.save(file)
    read = latency.read_csv(file)
    assert np.allclose(read.seconds, found.frame["seconds"], rtol=1e-4)
    assert list(read.length_tokens) == [8, 64] * 6
    assert list(read.decode) == [False] * 6 + [True] * 6
    text = file.read_text()
    assert torch.__version__ in text
    assert "float32" in text
    assert "ms" in str(found)


def test_what_cannot_be_measured_is_said(monkeypatch):
    with pytest.raises(ParameterError, match="no dense model"):
        measuring.measure(llm("DeepSeek-V3"), device="cpu")
    with pytest.raises(ParameterError, match="no data type"):
        measuring.measure(SMALL, device="cpu", dtype="int3")
    with pytest.raises(ParameterError, match="must be positive"):
        measuring.measure(SMALL, device="cpu", batches=(0,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ParameterError, match="no device 'cuda'"):
        measuring.measure(SMALL, device="cuda")
