"""Models read from a Hugging Face ``config.json``."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hetero import paths
from hetero.catalog import checkpoints
from hetero.catalog.models import Llm
from hetero.errors import CatalogError, DataError
from hetero.naming import RULE, good, slug

_OF_KIND = {
    "w": ("window", "window_kv_heads", "window_head_dim"),
    "i": ("index_heads", "index_dim"),
}
_BASIC = ("layers", "hidden", "heads", "vocab")
# Sizes that no model has would overflow what is computed from them.
_MOST = {"layers": 10_000, "max_position": 2**40}
_MOST_ELSE = 2**24
_MOST_PARAMS = 10**15
_SHAPE = "write the model's shape as hetero.catalog.Llm(...)."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """What keys and words of configurations mean; a row of config_keys.csv.

    ``size``: a field of :class:`Llm`, the first key that is there counts; ``shared``: the width of
    experts that every token visits; ``layer`` and ``block``: letters for words in lists of layers;
    ``beyond``: what models have that is not counted.
    """

    kind: str
    means: str
    keys: tuple[str, ...]


@lru_cache(maxsize=8)
def _keys(kind: str) -> dict[str, tuple[str, ...]]:
    from hetero.rows import read_records

    rows = read_records(paths.data("specs", "config_keys.csv"), _Keys)
    return {str(r["means"]): tuple(r["keys"]) for r in rows if r["kind"] == kind}  # type: ignore[arg-type]


def _letters(kind: str) -> dict[str, str]:
    return {word: letters for letters, words in _keys(kind).items() for word in words}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What configurations of one model type leave unsaid; a row of families.csv."""

    family: str
    requires: tuple[str, ...] = ()
    biases: str = ""
    qk_norm: bool = False
    gated_mlp: bool = True
    tied_embeddings: bool = False
    embedding_norm: bool = False
    max_position: int = 0
    learned_positions: bool = False
    shared_experts: int = 0
    mixers: str = ""
    notes: str = ""


@lru_cache(maxsize=1)
def _families() -> dict[str, _Family]:
    from hetero.rows import read_records

    rows = read_records(paths.data("specs", "families.csv"), _Family)
    return {str(row["family"]): _Family(**row) for row in rows}  # type: ignore[arg-type]


def read(config: Path | str | Mapping[str, object], *, name: str | None = None) -> Llm:
    """Model from a ``config.json``: a file, the folder it lies in, or its content.

    Of a folder the tensors count: their headers, or the sum that an index states. Otherwise weights
    follow from the shape and from the format that the configuration states. Of a multimodal model
    only the language part is read, and layers for multi-token prediction are not counted. A model
    all of whose layers have a window is read as if they had none: its cache is an upper bound.

    Parameters
    ----------
    name
        Name of the model; by default what the file calls it, else its folder's name.

    Raises
    ------
    DataError
        If the model has something that is not counted, or a key is missing or has the wrong type.

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
    kind = text.get("model_type") or content.get("model_type")
    family = _families().get(kind if isinstance(kind, str) else "") or _Family(family=str(kind))
    try:
        found = _Config(dict(text), dict(content), family, path).llm(name or _name(content, path))
        if found.params > _MOST_PARAMS:
            what = f"these sizes make a model of {found.params:.2g} parameters."
            raise DataError(what, path=path, resolve="give the sizes that the model has.")
        weights = checkpoints.stated(content, found, path)
    except CatalogError as error:
        raise DataError(error.what, path=path, resolve=error.resolve) from None
    found = replace(found, weights=weights)
    folder = path.parent if isinstance(path, Path) else None
    held = checkpoints.tensor_bytes(folder, found) if folder else None
    if held is None:
        return found
    return replace(found, other_bytes=held - found.weight_bytes(found.precision))


@dataclass(frozen=True)
class _Config:
    """A configuration on its way to a model."""

    text: dict[str, object]
    content: dict[str, object]
    family: _Family
    path: Path | str

    def llm(self, name: str) -> Llm:
        """The model, its weights in 16 bits."""
        text, family = self.text, self.family
        for what, keys in _keys("beyond").items():
            for key in keys:
                if text.get(key):
                    raise self.error(f"{what} ({key}), which is not counted.", _SHAPE)
        shape = self._sizes()
        mixers, feeds = self._layers(shape)
        for letter, fields in _OF_KIND.items():
            if letter not in mixers:
                shape = {field: size for field, size in shape.items() if field not in fields}
        shape |= self._state(shape["hidden"]) if "s" in mixers else {}
        act = text.get("hidden_act", text.get("mlp_hidden_act"))
        values: dict[str, Any] = {
            "tied_embeddings": bool(
                (self.content | text).get("tie_word_embeddings", family.tied_embeddings)
            ),
            "gated_mlp": family.gated_mlp and act != "relu2",
            "biases": family.biases or "none",
            "qk_norm": family.qk_norm or bool(text.get("use_qk_norm")),
            "embedding_norm": family.embedding_norm,
            "output_gate": any(text.get(key) for key in ("attn_output_gate", "mla_use_output_gate"))
            or family.family == "qwen3_next",
            "keys_are_values": bool(text.get("attention_k_eq_v")),
        }
        if values["biases"] == "none" and text.get("attention_bias"):
            values["biases"] = "attention"
        if family.learned_positions:
            # OPT keeps two rows for padding.
            values["learned_positions"] = shape["max_position"] + 2 * (family.family == "opt")
        if text.get("word_embed_proj_dim", shape["hidden"]) != shape["hidden"]:
            what = "the embedding is narrower than the layers (word_embed_proj_dim)"
            raise self.error(f"{what}, which is not counted.", _SHAPE)
        values |= {"mixers": mixers, "feeds": feeds, "source": f"config.json ({family.family})"}
        return Llm(name=name, **(shape | values))

    def _sizes(self) -> dict[str, int]:
        needed = {*_BASIC, *self.family.requires}
        every, own = dict(self.text), self.text.get("sparse_attention_config")
        every |= own if isinstance(own, Mapping) else {}
        if blocks := self._blocks():
            every.setdefault("num_hidden_layers", len(blocks))
        shape: dict[str, int] = {}
        for field, keys in _keys("size").items():
            value = _size(every, keys, self.path, _MOST.get(field, _MOST_ELSE), field in needed)
            if value is not None:
                shape[field] = value
        if not shape.get("experts"):
            for field in ("experts", "experts_active", "moe_intermediate", "first_dense_layers"):
                shape.pop(field, None)
        else:
            self._experts(shape)
        if self.family.max_position:
            shape.setdefault("max_position", self.family.max_position)
        if "intermediate" not in shape and self.family.family in ("bloom", "gpt2"):
            shape["intermediate"] = 4 * shape["hidden"]
        for field in ("intermediate", "max_position"):
            if field not in shape:
                _size({}, _keys("size")[field], self.path, 1, required=True)
        shape.setdefault("kv_heads", shape["heads"])
        shape.setdefault("head_dim", shape["hidden"] // shape["heads"])
        for field, key in (
            ("kv_heads", "num_global_key_value_heads"),
            ("head_dim", "global_head_dim"),
        ):
            if own_size := self._get(key):  # Gemma 4
                shape[f"window_{field}"], shape[field] = shape[field], own_size
        if shape.get("kv_lora_rank", 0) == 0 and shape.get("v_head_dim") == shape["head_dim"]:
            del shape["v_head_dim"]
        return shape

    def _experts(self, shape: dict[str, int]) -> None:
        """Sizes of experts, and of dense layers beside them."""
        inner = shape.setdefault("moe_intermediate", shape.get("intermediate", 0)) or 1
        dense = self._get("dense_intermediate_size", "intermediate_size_mlp")
        shape["intermediate"] = dense or shape.get("intermediate", 0)
        count = shape.get("shared_experts") or self.family.shared_experts
        if size := self._get(*(key for keys in _keys("shared").values() for key in keys)):
            count = size * max(1, count) / inner  # type: ignore[assignment]
        if self.text.get("enable_moe_block"):  # Gemma 4: beside a dense block
            count = shape["intermediate"] / inner  # type: ignore[assignment]
        count *= shape["hidden"] / (shape.get("expert_hidden") or shape["hidden"])  # type: ignore[assignment]
        if count != int(count):
            raise self.error("the shared expert is no multiple of a routed one.", _SHAPE)
        shape["shared_experts"] = int(count)

    # Layers ---------------------------------------------------------------------------------

    def _layers(self, shape: Mapping[str, int]) -> tuple[str, str]:
        """Kinds of the layers, as :class:`Llm` writes them."""
        count, dense = shape["layers"], shape.get("first_dense_layers", 0)
        if blocks := self._blocks():
            pairs = [_letters("block").get(one, "") for one in blocks]
            if "" in pairs or len(pairs) < count:
                raise self.error("its pattern of blocks has others than M, E, * and -.", _SHAPE)
            return "".join(one[0] for one in pairs), "".join(one[1] for one in pairs)
        feeds = self._feeds(count) if shape.get("experts") else ""
        mixers = self._mixers(count)
        if not shape.get("window") or "f" not in mixers:
            mixers = mixers.replace("w", "f")
        if shape.get("index_dim"):
            own = self._listed("indexer_types", count, {"full": "i", "shared": "f"})
            freq = self.text.get("sparse_attention_config")
            flags = freq.get("sparse_attention_freq") if isinstance(freq, Mapping) else None
            if isinstance(flags, list):
                own = "".join("fi"[bool(one)] for one in flags)
            mixers = own or mixers.replace("f", "i")
        return _shortest(mixers), _shortest(feeds[dense:]) if feeds else ""

    def _blocks(self) -> Sequence[str]:
        found = self.text.get("hybrid_override_pattern") or self.text.get("layers_block_type")
        if isinstance(found, str):
            return found
        every = isinstance(found, list) and all(isinstance(one, str) for one in found)
        return cast("list[str]", found) if every else ()

    def _listed(self, key: str, count: int, words: Mapping[str, str]) -> str:
        """Letters of a list of words, one per layer; empty without one."""
        found = self.text.get(key)
        if not isinstance(found, list):
            return ""
        letters = [words.get(one, "") if isinstance(one, str) else "" for one in found]
        if "" in letters[:count] or len(letters) < count:
            raise self.error(f"'{key}' names layers that are not known.", _SHAPE)
        return "".join(letters[:count])

    def _mixers(self, count: int) -> str:
        text = self.text
        if found := self._listed("layer_types", count, _letters("layer")):
            return found
        own = text.get("linear_attn_config")
        if isinstance(own, Mapping) and isinstance(full := own.get("full_attn_layers"), list):
            return "".join("f" if k + 1 in full else "s" for k in range(count))
        flags = text.get("hybrid_layer_pattern"), text.get("attn_type_list")
        for given, letters in zip(flags, ("fw", "sf"), strict=True):
            if isinstance(given, list) and len(given) >= count:
                return "".join(letters[bool(one)] for one in given[:count])
        if every := self._get("full_attention_interval"):
            return ("s" * (every - 1) + "f") * -(-count // every)
        if text.get("use_sliding_window") is False:
            return "f"
        if every := self._get("sliding_window_pattern"):
            return "w" * (every - 1) + "f"
        return self.family.mixers or ("w" if self._get("sliding_window") else "f")

    def _feeds(self, count: int) -> str:
        text = self.text
        if found := self._listed("mlp_layer_types", count, _letters("layer")):
            return found
        given = text.get("moe_layer_freq")
        if isinstance(given, list) and len(given) >= count:
            return "".join("de"[bool(one)] for one in given[:count])
        only = text.get("mlp_only_layers")
        dense = {k for k in only if isinstance(k, int)} if isinstance(only, list) else set()
        for key in ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step"):
            step = None if isinstance(text.get(key), list) else self._get(key)
            if step and step > 1:
                return "".join("de"[(k + 1) % step == 0 and k not in dense] for k in range(count))
        return "".join("de"[k not in dense] for k in range(count))

    # States ---------------------------------------------------------------------------------

    def _state(self, hidden: int) -> dict[str, int]:
        """Parameters and bytes of one layer that carries a state."""
        text, get = self.text, self._needed
        own = text.get("linear_attn_config")
        types = text.get("mamba_ssm_dtype"), text.get("mamba_ssm_cache_dtype")
        wide = 4 if "float32" in types else 2
        if isinstance(own, Mapping):  # Kimi Delta Attention
            dim = get("head_dim", of=own)
            inner, heads = dim * get("num_heads", of=own), get("num_heads", of=own)
            conv = 3 * inner * get("short_conv_kernel_size", of=own)
            low = dim * (hidden + inner)
            gate = hidden * inner if own.get("use_full_rank_gate") else low
            params = 4 * hidden * inner + hidden * heads + low + gate + conv + 2 * inner
            return {"state_params": params, "state_bytes": 4 * inner * dim + 2 * (conv - 3 * inner)}
        if "conv_L_cache" in text:  # LFM2: a short convolution between gates
            conv = get("conv_L_cache")
            return {"state_params": (4 * hidden + conv) * hidden, "state_bytes": 2 * conv * hidden}
        if "linear_num_value_heads" in text:  # gated delta rule
            heads, dim, gates = get("linear_num_value_heads"), get("linear_value_head_dim"), 2
            groups, size = get("linear_num_key_heads"), get("linear_key_head_dim")
            conv = get("linear_conv_kernel_dim")
        elif "mamba_num_heads" in text or "mamba_n_heads" in text:  # Mamba 2
            heads, gates = get("mamba_num_heads", "mamba_n_heads"), 1
            dim, size = (
                get("mamba_head_dim", "mamba_d_head"),
                get("ssm_state_size", "mamba_d_state"),
            )
            groups, conv = get("n_groups", "mamba_n_groups"), get("conv_kernel", "mamba_d_conv")
        else:
            raise self.error("the sizes of its layers with states are not those known.", _SHAPE)
        inner, mixed = heads * dim, heads * dim + 2 * groups * size
        params = hidden * (inner + mixed + gates * heads + inner) + mixed * conv + 3 * heads
        return {"state_params": params, "state_bytes": wide * inner * size + 2 * mixed * (conv - 1)}

    # Values ---------------------------------------------------------------------------------

    def _get(self, *keys: str) -> int | None:
        return _size(self.text, keys, self.path, _MOST_ELSE, required=False)

    def _needed(self, *keys: str, of: Mapping[str, object] | None = None) -> int:
        return _size(of or self.text, keys, self.path, _MOST_ELSE, required=True) or 0

    def error(self, what: str, resolve: str) -> DataError:
        """An error about this configuration."""
        return DataError(what, path=self.path, resolve=resolve)


def _shortest(pattern: str) -> str:
    """The part of a pattern that repeats."""
    count = len(pattern)
    parts = (pattern[:size] for size in range(1, count))
    return next((one for one in parts if (one * count)[:count] == pattern), pattern)


def _load(config: Path | str | Mapping[str, object]) -> tuple[Path | str, Mapping[str, object]]:
    if isinstance(config, Mapping):
        return "config", config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    return path, checkpoints.json_object(path)


def _size(
    text: Mapping[str, object],
    keys: tuple[str, ...],
    path: Path | str,
    most: int,
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
