"""Models read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from hetero.catalog.models import Llm
from hetero.errors import DataError
from hetero.naming import RULE, good, slug

# Where families write the same size under different keys; the first that is there counts.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embed", "n_embd", "emb_size"),
    "heads": ("num_attention_heads", "n_head", "num_q_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "key_size"),
    "intermediate": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions", "seq_length", "sequence_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_active": ("num_experts_per_tok", "num_selected_experts", "experts_per_token"),
    "moe_intermediate": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "first_dense_layers": ("first_k_dense_replace",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
_BASIC = ("layers", "hidden", "heads", "vocab")
# Sizes that no model has would overflow what is computed from them.
_MOST = {"layers": 10_000, "max_position": 2**40}
_MOST_ELSE = 2**24
_MOST_PARAMS = 10**15
_EXPERTS = ("experts", "experts_active")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")

#: Families that can be read: sizes each must state beside the basic ones, and fixed properties.
_FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "llama": (("intermediate", "max_position"), {}),
    "mistral": (("intermediate", "max_position"), {}),
    "qwen2": (("intermediate", "max_position"), {"biases": "qkv"}),
    "qwen3": (("intermediate", "max_position", "head_dim"), {"qk_norm": True}),
    "mixtral": (("intermediate", "max_position", *_EXPERTS), {}),
    "qwen3_moe": (
        ("max_position", "head_dim", "moe_intermediate", *_EXPERTS),
        {"qk_norm": True},
    ),
    "gpt_oss": (
        ("intermediate", "max_position", "head_dim", *_EXPERTS),
        {"biases": "attention", "expert_bits": 4.25},
    ),
    "deepseek_v2": (("intermediate", "max_position", "moe_intermediate", *_EXPERTS, *_LATENT), {}),
    "deepseek_v3": (("intermediate", "max_position", "moe_intermediate", *_EXPERTS, *_LATENT), {}),
    "kimi_k2": (("intermediate", "max_position", "moe_intermediate", *_EXPERTS, *_LATENT), {}),
    "grok-1": (("intermediate", "max_position", *_EXPERTS), {"tied_embeddings": True}),
    "opt": (
        ("intermediate", "max_position"),
        {"gated_mlp": False, "tied_embeddings": True, "biases": "all"},
    ),
    "bloom": (
        (),
        {
            "gated_mlp": False,
            "tied_embeddings": True,
            "biases": "all",
            "embedding_norm": True,
            "max_position": 2048,
        },
    ),
    "gpt2": (
        ("max_position",),
        {"gated_mlp": False, "tied_embeddings": True, "biases": "all"},
    ),
}


def read(config: Path | str | Mapping[str, object], *, name: str | None = None) -> Llm:
    """Model from a ``config.json``: a file, the folder it lies in, or its content.

    Sliding windows other than gpt-oss's are ignored: the cache of such a model is an upper bound.
    Of a multimodal model only the language part is read. Layers for multi-token prediction are not
    counted.

    Parameters
    ----------
    name
        Name of the model; by default what the file calls it, else its folder's name.

    Raises
    ------
    DataError
        If the family is unknown, or a key is missing or has the wrong type.

    Examples
    --------
    >>> config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
    ...           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    ...           "intermediate_size": 14336, "max_position_embeddings": 8192}
    >>> read(config, name="my model").params
    8030261248
    """
    path, content = _load(config)
    nested = content.get("text_config")
    text = cast("Mapping[str, object]", nested) if isinstance(nested, Mapping) else content
    family = text.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise DataError(
            f"the model type {family!r} is not known.",
            path=path,
            resolve=f"use a model of type {', '.join(_FAMILIES)}, or write its shape as "
            "hetero.catalog.Llm(...).",
        )
    required, fixed = _FAMILIES[family]
    shape: dict[str, int] = {}
    for field, keys in _KEYS.items():
        most = _MOST.get(field, _MOST_ELSE)
        value = _size(text, keys, path, most, required=field in _BASIC or field in required)
        if value is not None:
            shape[field] = value
    found = Llm(
        name=name or _name(content, path),
        source=f"config.json ({family})",
        **{**_defaults(shape), **_family_sizes(family, shape, text, path), **fixed},  # type: ignore[arg-type]
    )
    if found.params > _MOST_PARAMS:
        what = f"these sizes make a model of {found.params:.2g} parameters."
        raise DataError(what, path=path, resolve="give the sizes that the model has.")
    return found


def _defaults(shape: dict[str, int]) -> dict[str, object]:
    """Sizes that a config may leave out."""
    return {
        "kv_heads": shape["heads"],
        "head_dim": shape["hidden"] // shape["heads"],
        "intermediate": 4 * shape["hidden"],
        **shape,
    }


def _family_sizes(
    family: str, shape: dict[str, int], text: Mapping[str, object], path: Path | str
) -> dict[str, object]:
    """What only some families have, or write in their own way."""
    out: dict[str, object] = {"tied_embeddings": bool(text.get("tie_word_embeddings", False))}
    if family == "gpt_oss":
        kinds = text.get("layer_types")
        windowed = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
        # The published configurations alternate, whether they list the layers or not.
        out["windowed_layers"] = windowed or shape["layers"] // 2
    if family in ("mixtral", "grok-1", "gpt_oss"):
        out["moe_intermediate"] = shape["intermediate"]
    if family == "opt":
        out["learned_positions"] = shape["max_position"] + 2  # OPT keeps two rows for padding
        if text.get("word_embed_proj_dim", shape["hidden"]) != shape["hidden"]:
            raise DataError(
                "the embedding is narrower than the layers (word_embed_proj_dim), which is not "
                "counted.",
                path=path,
                resolve="write the model's shape as hetero.catalog.Llm(...).",
            )
    if family == "gpt2":
        out["learned_positions"] = shape["max_position"]
    if family in ("llama", "mistral", "qwen3", "qwen3_moe") and text.get("attention_bias"):
        out["biases"] = "attention"
    uneven = (
        text.get("mlp_only_layers")
        or text.get("decoder_sparse_step", 1) != 1
        or text.get("moe_layer_freq", 1) != 1
    )
    if uneven:
        raise DataError(
            "only some layers behind the first dense ones have experts, which is not counted.",
            path=path,
            resolve="write the model's shape as hetero.catalog.Llm(...).",
        )
    return out


def _load(config: Path | str | Mapping[str, object]) -> tuple[Path | str, Mapping[str, object]]:
    if isinstance(config, Mapping):
        return "config", config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            "there is no such file.", path=path, resolve="give the path of a config.json."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"this is no JSON: {error}.",
            path=path,
            line=getattr(error, "lineno", None),
            resolve="give the config.json of a Hugging Face model.",
        ) from None
    if not isinstance(content, dict):
        raise DataError(
            "this is no JSON object.", path=path, resolve="give the config.json of a model."
        )
    return path, content


def _size(
    text: Mapping[str, object],
    keys: tuple[str, ...],
    path: Path | str,
    most: int,
    *,
    required: bool,
) -> int | None:
    for key in keys:
        value = text.get(key)
        if value is None:
            continue
        what = f"'{key}' is {reprlib.repr(value)}."
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(what, path=path, resolve="give it as a whole number.")
        if not (1 if required else 0) <= value <= most:
            raise DataError(what, path=path, resolve="give the size that the model has.")
        return value
    if required:
        rule = "add it, or use the model's original config.json."
        raise DataError(f"the key '{keys[0]}' is missing.", path=path, resolve=rule)
    return None


def _name(content: Mapping[str, object], path: Path | str) -> str:
    given = content.get("_name_or_path")
    if isinstance(given, str) and given:
        found = given.rstrip("/").rsplit("/", 1)[-1]
        if not good(found):
            what = f"'_name_or_path' is {reprlib.repr(given)}."
            raise DataError(what, path=path, resolve=f"end it with {RULE}.")
        return found
    folder = path.resolve().parent.name if isinstance(path, Path) else "model"
    return folder if good(folder) else slug(folder)
