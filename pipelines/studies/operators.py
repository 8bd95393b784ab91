"""Step times from NVIDIA's measured operator tables, the optional extra ``silicon``.

The package aiconfigurator-core carries measurements of matrix products, attention kernels and
collectives on the GPUs of :data:`SYSTEMS` under vLLM, SGLang and TensorRT-LLM, and adds them up for
a model; what it has no table for it estimates. Nothing between the operators (scheduling, sampling)
is in it. Installed, it works without a network.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hetero.catalog import Gpu, Llm
from hetero.errors import ParameterError
from hetero.latency.sources.measured import GRID_BATCHES, GRID_LENGTHS
from hetero.latency.tables import Measurements

Backend = Literal["vllm", "sglang", "trtllm"]

_PACKAGE = "aiconfigurator_core"
SYSTEMS = {
    "A100-SXM-80GB": "a100_sxm",
    "H100-SXM": "h100_sxm",
    "H200-SXM": "h200_sxm",
    "B200-SXM": "b200_sxm",
    "B300-SXM": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
    "RTX-PRO-6000-Server": "rtx_pro_6000_server",
    "Arc-Pro-B60": "b60",
}
_MEMORY_SHARE = 0.9


def available() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


def gpus() -> tuple[str, ...]:
    """GPUs of the catalog that the extra has measurements of.

    Examples
    --------
    >>> "H200-SXM" in gpus(), "T4" in gpus()
    (True, False)
    """
    return tuple(SYSTEMS)


def measurements(
    gpu: Gpu,
    llm: Llm,
    tensor_parallel: int = 1,
    *,
    engine: Backend = "vllm",
    batches: ArrayLike = GRID_BATCHES,
    lengths: ArrayLike = GRID_LENGTHS,
) -> Measurements:
    """Prefills and decode steps in bf16 over batches and lengths; those that fit the memory.

    Parameters
    ----------
    batches, lengths
        Requests, and tokens per request; every pair of both is asked for.
    """
    if gpu.name not in SYSTEMS:
        raise ParameterError(
            f"aiconfigurator has no measurements of {gpu.name}.",
            resolve=f"use one of {', '.join(SYSTEMS)}, or another latency source.",
        )
    handle = _handle(SYSTEMS[gpu.name], engine, config(llm), tensor_parallel)
    free_bytes = _MEMORY_SHARE * tensor_parallel * gpu.mem_bytes - llm.weight_bytes()
    pairs = [
        (int(b), int(length))
        for b in np.asarray(batches).tolist()
        for length in np.asarray(lengths).tolist()
        if b * length * llm.kv_bytes_per_token() <= free_bytes
    ]
    if not pairs:
        raise ParameterError(
            f"No batch of {llm.name} fits {gpu.name} x{tensor_parallel}.",
            resolve="use more GPUs, or smaller batches and lengths.",
        )
    with _quiet():
        prefill_ms = [handle.predict_prefill_latency(b, length) for b, length in pairs]
        decode_ms = [handle.predict_decode_latency(b, length, 2) for b, length in pairs]
    batch, length = np.array(pairs, dtype=np.float64).T
    version = importlib.metadata.version("aiconfigurator-core")
    return Measurements(
        decode=np.repeat([False, True], len(pairs)),
        batch=np.tile(batch, 2),
        length_tokens=np.tile(length, 2),
        seconds=np.array([*prefill_ms, *decode_ms]) / 1e3,
        gpu=gpu.name,
        llm=llm.name,
        tensor_parallel=tensor_parallel,
        engine=f"{engine} in aiconfigurator-core {version}",
        source="aiconfigurator",
        provenance="derived",  # sums of measured operators, not measured steps
    )


def package() -> Any:
    """The installed package, or what to do about it."""
    if not available():
        raise ParameterError(
            "Operator measurements come with the package aiconfigurator-core, which is not "
            "installed.",
            resolve="install it with `pip install 'hetero[silicon]'`, or use the step models in "
            "data/measured (hetero.latency.sources.measured.aiconfigurator_step_models).",
        )
    return importlib.import_module(_PACKAGE)


@lru_cache(maxsize=32)
def _handle(system: str, engine: Backend, config: str, tensor_parallel: int) -> Any:
    package()
    sdk = importlib.import_module(f"{_PACKAGE}.sdk")
    with tempfile.TemporaryDirectory() as folder, _quiet():
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        return sdk.EngineHandle.compile(
            folder,
            system,
            engine,
            backend_version="current",
            tp_size=tensor_parallel,
            gemm_quant_mode="bfloat16",
            kvcache_quant_mode="bfloat16",
            fmha_quant_mode="bfloat16",
        )


def config(llm: Llm) -> str:
    """A dense transformer as a Hugging Face configuration."""
    if llm.experts > 1 or llm.kv_lora_rank:
        raise ParameterError(
            f"{llm.name} is no dense transformer with grouped attention.",
            resolve="use the analytic model of mixture-of-experts models for it.",
        )
    return json.dumps(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": llm.hidden,
            "intermediate_size": llm.intermediate,
            "num_hidden_layers": llm.layers,
            "num_attention_heads": llm.heads,
            "num_key_value_heads": llm.kv_heads,
            "head_dim": llm.head_dim,
            "vocab_size": llm.vocab,
            "max_position_embeddings": llm.max_position,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        }
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the package from telling which tables it loads."""
    logger = logging.getLogger(_PACKAGE)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
