"""What checkpoints weigh: formats that configurations state, headers of tensors, and the hub."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero import paths
from hetero.catalog.precision import WeightFormat, weight_format, weight_formats
from hetero.errors import DataError

if TYPE_CHECKING:
    from hetero.catalog.models import Llm

_CONFIG = "config.json"
_QUANTISED = "hf_quant_config.json"
_INDEX = "model.safetensors.index.json"
_MOST_BYTES = 64 * 2**20
_LEFT = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
# Names of the same modules in other families.
_SAME = (
    (r"\b(block_sparse_moe|feed_forward|ffn|mixer(?=\.(experts|shared)))\b", "mlp"),
    (r"\bshared_expert\b", "shared_experts"),
    (r"\b(attn|mixer(?=\.[qkvo]_proj))\b", "self_attn"),
    (r"\bmixer(?=\.(in|out)_proj)", "linear_attn"),
    (r"\b(in_proj_qkvz?|in_proj_qkvz)\b", "in_proj"),
    (r"\bw1\b", "gate_proj"),
    (r"\bw2\b", "down_proj"),
    (r"\bw3\b", "up_proj"),
)


def json_object(path: Path) -> dict[str, Any]:
    """What a file of JSON holds.

    Raises
    ------
    DataError
        If there is no such file, or it holds something else.
    """
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
    return content


# Formats -----------------------------------------------------------------------------------


def stated(content: Mapping[str, object], llm: Llm, path: Path | str) -> WeightFormat | None:
    """Format of the weights that a configuration states; None for 16 bits.

    ``quantization_config``, or ``hf_quant_config.json`` beside it, with the modules that it leaves
    in 16 bits: bits are means over the modules of a kind.

    Raises
    ------
    DataError
        If the method of quantisation is not known.
    """
    nested = content.get("text_config")
    text = nested if isinstance(nested, Mapping) else content
    own = content.get("quantization_config") or text.get("quantization_config")
    if own is None and isinstance(path, Path) and (beside := path.parent / _QUANTISED).is_file():
        read = json_object(beside)
        own = read.get("quantization", read)
    if not isinstance(own, Mapping):
        return None
    layers, whole = own.get("quantized_layers"), _whole(own, path)
    named = {_plain(k): v for k, v in layers.items()} if isinstance(layers, Mapping) else {}
    lists = [found for key in _LEFT if isinstance(found := own.get(key), list)]
    left = _left([one for found in lists for one in found if isinstance(one, str)], path)
    sums: dict[str, list[float]] = {}
    for kind, name, params in _modules(llm, beside=bool(text.get("enable_moe_block"))):
        parts, form = name.split("."), whole
        above = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
        if named:
            algo = next((named[one] for one in above if one in named), "fp16")
            algo = algo.get("quant_algo") if isinstance(algo, Mapping) else algo
            form = weight_formats().get(str(algo).lower(), whole)
        elif left(name, above):
            form = weight_format("fp16")
        total = sums.setdefault(kind, [0.0, 0.0])
        total[0] += params * getattr(form, kind)
        total[1] += params
    means = {kind: got / n for kind, (got, n) in sums.items() if n}
    found = replace(whole, **means)  # type: ignore[arg-type]
    if not named:
        return found
    main = means[max(means, key=lambda kind: sums[kind][1])]
    precision = "fp4" if main < 6 else "fp8" if main < 12 else "fp16"
    return replace(found, name="mixed", precision=precision)


def _whole(own: Mapping[str, Any], path: Path | str) -> WeightFormat:
    """Format of the modules that are quantised."""
    method = str(own.get("quant_algo") or own.get("quant_method") or own.get("format")).lower()
    groups = own.get("config_groups")
    bits, size, zero = own.get("bits"), own.get("group_size"), own.get("zero_point", True)
    if method in ("compressed-tensors", "modelopt", "none") and isinstance(groups, Mapping):
        first = next(iter(groups.values()), None)
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if isinstance(weights, Mapping):
            bits, size = weights.get("num_bits"), weights.get("group_size")
            zero = weights.get("symmetric") is False
            method = "int8" if bits == 8 else "w4a16"
            if weights.get("type") == "float":
                method = {"(4, 16)": "nvfp4", "(4, 32)": "mxfp4"}.get(str((bits, size)), "fp8")
    if method == "bitsandbytes":
        method = "bnb4" if own.get("load_in_4bit") else "int8"
    found = weight_formats().get("fp8" if method == "mixed_precision" else method)
    if found is None:
        known = ", ".join(sorted({one.name for one in weight_formats().values()}))
        raise DataError(
            f"its weights are quantised by {reprlib.repr(method)}, whose sizes are not known.",
            path=path,
            resolve=f"take quantization_config out, and give --precision: {known}.",
        )
    if (
        found.precision == "int4"
        and isinstance(bits, int)
        and isinstance(size, int)
        and 0 < bits <= 8
    ):
        each = bits + (16 + bits * bool(zero)) / size if size > 0 else float(bits)
        return replace(found, attention=each, dense=each, experts=each, shared=each)
    return found


def _left(rules: list[str], path: Path | str) -> Callable[[str, list[str]], bool]:
    """Whether a module, or one that it is part of, stays in 16 bits."""
    every = [_plain(one) for text in rules for one in _globs(text, path)]
    names = {one for one in every if "*" not in one}
    globs = "|".join(fnmatch.translate(one + "*") for one in every if "*" in one)
    pattern = re.compile(globs) if globs else None

    def has(name: str, above: list[str]) -> bool:
        known = not names.isdisjoint(above) or not names.isdisjoint(name.split("."))
        return known or bool(pattern and pattern.match(name))

    return has


def _globs(text: str, path: Path | str) -> Iterator[str]:
    """Names and patterns with ``*`` that a rule stands for; ``re:`` marks an expression."""
    if not text.startswith("re:"):
        yield text
        return
    # Expressions of a file are not run: few of them would take for ever.
    simple = text[3:].strip("^$").replace(".*", "*").replace("\\.", ".")
    head, bracket, rest = simple.partition("(")
    inner, _, tail = rest.partition(")")
    every = [head + one + tail for one in inner.split("|")] if bracket else [simple]
    if any(set("()[]{}?+\\|^$") & set(one) for one in every):
        raise DataError(
            f"the rule {reprlib.repr(text)} for modules left in 16 bits is not read.",
            path=path,
            resolve="write it with '.*' and one '(a|b)' alone.",
        )
    yield from every


def _plain(name: str) -> str:
    """Name of a module as most families have it, from its layer on."""
    at = name.find("layers.")
    name = name[at:] if at >= 0 else name.removeprefix("model.").removeprefix("language_model.")
    for pattern, usual in _SAME:
        name = re.sub(pattern, usual, name)
    return name


def _modules(llm: Llm, *, beside: bool) -> Iterator[tuple[str, str, int]]:
    """Modules of all layers: kind, name and parameters; one expert stands for all.

    ``beside`` says that experts stand beside a dense block, which counts as a shared one.
    """
    routed, shared = ("experts.0", "mlp") if beside else ("mlp.experts.0", "mlp.shared_experts")
    every = [
        ("experts", routed, llm.experts * llm.expert_params),
        ("shared", shared, llm.shared_experts * llm.expert_params),
    ]
    feeds = {"d": [("dense", "mlp", llm.mlp_params)], "e": every, "-": []}
    for k in range(llm.layers):
        ((mixer, feed),) = llm.kinds(k, 1)
        block = "linear_attn" if mixer == "s" else "self_attn"
        for leaf, params in llm.attention_products(mixer).items():
            yield "attention", f"layers.{k}.{block}.{leaf}", params
        for kind, block, params in feeds[feed]:
            for leaf in ("gate_proj", "up_proj", "down_proj")[not llm.gated_mlp :]:
                yield kind, f"layers.{k}.{block}.{leaf}", params


# Tensors -----------------------------------------------------------------------------------


def tensor_bytes(folder: Path, llm: Llm) -> int | None:
    """What the tensors of a folder weigh that an engine loads [bytes]; None where none says so.

    Their headers count, else the sum of an index. Layers for multi-token prediction are left out.
    """
    index = folder / _INDEX
    listed = json_object(index) if index.is_file() else {}
    names, meta = listed.get("weight_map"), listed.get("metadata")
    names = names if isinstance(names, Mapping) else {}
    files = sorted(folder.glob("*.safetensors"))
    if files and {str(one) for one in names.values()} <= {one.name for one in files}:
        return sum(_header_bytes(one, llm) for one in files)
    total = meta.get("total_size") if isinstance(meta, Mapping) else None
    known = isinstance(total, int) and 0 < total < 2**60 and all(_loaded(n, llm) for n in names)
    return total if known else None


def _loaded(name: str, llm: Llm) -> bool:
    layer = re.search(r"\blayers\.(\d{1,6})\.", name)
    return "mtp" not in name and (layer is None or int(layer.group(1)) < llm.layers)


def _header_bytes(path: Path, llm: Llm) -> int:
    """What the tensors of a file weigh, by its header of their types, shapes and places."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size) if size <= _MOST_BYTES else b"")
        places = [
            one["data_offsets"]
            for name, one in header.items()
            if name != "__metadata__" and _loaded(name, llm)
        ]
        return sum(max(0, int(end) - int(start)) for start, end in places)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        raise DataError(
            "it has no header of tensors.", path=path, resolve="download it again, or remove it."
        ) from None


# The hub -----------------------------------------------------------------------------------


def hub_folder(name: str) -> Path:
    """Folder with the metadata of a repository of Hugging Face's hub: no weights, kept for later.

    ``HF_ENDPOINT`` names another hub, ``HF_TOKEN`` opens gated ones, and with ``HF_HUB_OFFLINE``
    only what was kept is used.

    Raises
    ------
    DataError
        If the hub cannot be reached, has no such model, or wants a licence accepted first.
    """
    folder = paths.raw().joinpath("hub", *name.split("/"))
    if (folder / _CONFIG).is_file():
        return folder
    found = {_CONFIG: _fetched(name, _CONFIG)}
    for other in (_QUANTISED, _INDEX):
        try:
            found[other] = _fetched(name, other)
        except FileNotFoundError:
            continue
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in reversed(found.items()):
        (folder / file).write_bytes(text)
    return folder


def _fetched(name: str, file: str) -> bytes:
    """One small file of a repository."""
    import requests

    own = "give the folder of the model, or its config.json."
    failed = partial(DataError, path=name)
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        raise failed("HF_HUB_OFFLINE is set, and nothing was kept of this model.", resolve=own)
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    address = f"{endpoint}/{name}/resolve/main/{file}"
    try:
        with requests.get(address, headers=headers, timeout=20, stream=True) as reply:
            if reply.status_code in (401, 403):
                raise failed(
                    "the hub wants a licence accepted, or has no such model.",
                    resolve=f"accept it there and set HF_TOKEN, or {own}",
                )
            if reply.status_code == 404:
                if file != _CONFIG:
                    raise FileNotFoundError(file)
                raise failed(f"the hub has no {file} of it.", resolve=f"check the name, or {own}")
            reply.raise_for_status()
            text = b""
            for part in reply.iter_content(2**20):
                text += part
                if len(text) > _MOST_BYTES:
                    raise failed(f"its {file} is larger than any known.", resolve=own)
            return text
    except requests.RequestException as error:
        what = type(error).__name__
        raise failed(
            f"the hub cannot be reached ({what}).", resolve=f"go online, or {own}"
        ) from None
