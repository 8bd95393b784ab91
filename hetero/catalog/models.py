"""Language models: their shape, and the parameters, bytes and operations that follow from it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from hetero import paths
from hetero.catalog.precision import (
    PRECISION_BITS,
    WeightFormat,
    bytes_of,
    weight_format,
    weight_formats,
)
from hetero.catalog.tables import Records, read_table
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError, ParameterError, require

KvFormula = Literal["model", "full"]
_INDEX_SCALE_BYTES = 4
_MOST_LAYERS = 10_000  # they are written out one by one


class LayerParams(NamedTuple):
    """Parameters, as formats of weights tell them apart; ``rest`` stays in 16 bits in all."""

    attention: int = 0
    dense: int = 0
    experts: int = 0
    shared: int = 0
    rest: int = 0


@lru_cache(maxsize=256)
def _layers_of(mixers: str, feeds: str, dense: int, layers: int) -> tuple[tuple[str, str], ...]:
    every = mixers * -(-layers // len(mixers)), "d" * dense + feeds * -(-layers // len(feeds))
    return tuple(zip(every[0][:layers], every[1][:layers], strict=True))


@lru_cache(maxsize=4096)
def _counted(kinds: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], int]:
    return dict(Counter(kinds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Llm(Shown):
    """Shape of a decoder-only language model.

    Attributes
    ----------
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_position
        Sizes of the network; ``heads * head_dim`` need not be ``hidden``. ``kv_heads`` below
        ``heads`` is grouped-query attention. With latent attention ``head_dim`` is unused.
    gated_mlp
        Three matrices per feed-forward block (SwiGLU) instead of two.
    biases
        ``none``; ``qkv`` on the query, key and value projections; ``attention`` also on the
        output projection; ``all`` on every projection, with LayerNorm instead of RMSNorm.
    qk_norm
        Norms over query and key heads (Qwen3).
    learned_positions
        Rows of a learned position table, 0 without one.
    embedding_norm
        A LayerNorm behind the embedding (BLOOM).
    experts, experts_active, moe_intermediate, shared_experts, first_dense_layers
        Mixture of experts: routed experts per layer, how many a token visits, their inner
        size, experts every token visits, and how many leading layers have none. 0 in dense models.
    expert_hidden
        Width that routed experts work in where it is not ``hidden``: two products lead there and
        back.
    mixers, feeds
        Layers as letters, repeated to their number. How tokens meet in them: ``f`` all (latent
        where ``kv_lora_rank`` says so), ``i`` those that an index chooses, ``w`` those of a window,
        ``s`` through a constant state (linear attention, state space), ``-`` not at all. And behind
        the first dense layers: ``d`` a dense block, ``e`` experts, ``-`` nothing.
    window, window_kv_heads, window_head_dim
        Tokens of a window, and the heads of such layers where they are not those of the others.
    state_params, state_bytes
        Of one layer with a state: its parameters, and what it holds of a request, whatever its
        length.
    output_gate, keys_are_values
        Attention with a gate as wide as its output; without values of their own where all tokens
        meet.
    index_heads, index_dim
        Of an index (DeepSeek-V3.2), which caches as many 8-bit numbers and a scale per token.
    ships
        Format that checkpoints are published in, a name of ``data/specs/formats.csv``; empty for 16
        bits.
    weights, other_bytes
        Format of one checkpoint, and what its tensors weigh beyond the parameters counted here.
    q_lora_rank, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim
        Multi-head latent attention (DeepSeek-V2): ranks of the compressed queries (0: not
        compressed) and keys-values, and the sizes of its heads. 0 in other models.

    Examples
    --------
    >>> model = llm("Llama-3-8B")
    >>> model.params
    8030261248
    >>> model.kv_bytes_per_token("fp16"), model.kv_bytes_per_token("fp16", "full")
    (131072, 524288)
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    biases: str = "none"
    qk_norm: bool = False
    learned_positions: int = 0
    embedding_norm: bool = False
    experts: int = 0
    experts_active: int = 0
    moe_intermediate: int = 0
    shared_experts: int = 0
    first_dense_layers: int = 0
    expert_hidden: int = 0
    mixers: str = "f"
    feeds: str = ""
    window: int = 0
    window_kv_heads: int = 0
    window_head_dim: int = 0
    state_params: int = 0
    state_bytes: int = 0
    output_gate: bool = False
    keys_are_values: bool = False
    index_heads: int = 0
    index_dim: int = 0
    ships: str = ""
    weights: WeightFormat | None = None
    other_bytes: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    params_nominal_b: float | None = None
    aliases: tuple[str, ...] = ()
    in_papers: tuple[str, ...] = ()
    source: str = ""
    checked: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "max_position")
        for field in sizes + (("moe_intermediate", "experts_active") if self.experts else ()):
            if getattr(self, field) < 1:
                self._refuse(f"{field} = {getattr(self, field)}", "give a whole number above 0")
        if self.layers > _MOST_LAYERS:
            self._refuse(f"{self.layers} layers", f"give at most {_MOST_LAYERS:,}")
        if self.heads % self.kv_heads:
            self._refuse(
                f"{self.heads} heads for {self.kv_heads} KV heads",
                "give a number of KV heads that divides the heads",
            )
        if not self.mixers or set(self.mixers) - set("fiws-") or set(self.feeds) - set("de-"):
            self._refuse(f"layers '{self.mixers}', '{self.feeds}'", "use f, i, w, s, d, e and -")
        if self.experts_active > self.experts or self.first_dense_layers > self.layers:
            self._refuse(
                f"{self.experts_active} active of {self.experts} experts and "
                f"{self.first_dense_layers} dense of {self.layers} layers",
                "give no more than there are",
            )
        if self.intermediate < 1 and self.dense_layers:
            self._refuse(f"intermediate = {self.intermediate}", "give a whole number above 0")
        if self.biases not in ("none", "qkv", "attention", "all"):
            self._refuse(f"biases = '{self.biases}'", "use none, qkv, attention or all")
        if self.kv_lora_rank and not (self.qk_nope_head_dim and self.v_head_dim):
            self._refuse("latent attention without head sizes", "give all five of its sizes")
        if not self.caching_layers:
            self._refuse("no layer whose cache grows with the context", "leave one that does")
        needed = {"w": self.window, "s": self.state_params, "i": self.index_dim, "e": self.experts}
        for kind, size in needed.items():
            if size < 1 and any(kind in pair for pair in self.kinds()):
                self._refuse(f"layers '{kind}' without sizes", "give them")
        if self.ships:
            weight_format(self.ships)

    def _refuse(self, what: str, how: str) -> None:
        raise CatalogError(f"Model '{self.name}' has {what}.", resolve=f"{how}.")

    @classmethod
    def from_config(
        cls, config: Path | str | Mapping[str, object], *, name: str | None = None
    ) -> Llm:
        """Model from a Hugging Face ``config.json``, see :mod:`hetero.catalog.huggingface`."""
        from hetero.catalog import huggingface

        return huggingface.read(config, name=name)

    # Which layers are which -----------------------------------------------------------------

    @property
    def latent(self) -> bool:
        """Whether attention caches a latent vector (MLA) instead of keys and values."""
        return self.kv_lora_rank > 0

    def kinds(self, start: int = 0, count: int | None = None) -> dict[tuple[str, str], int]:
        """How many of ``count`` layers from ``start`` are of each kind, as letters.

        Examples
        --------
        >>> llm("gpt-oss-20b").kinds(0, 5)
        {('w', 'e'): 3, ('f', 'e'): 2}
        """
        feeds = self.feeds or ("e" if self.experts else "d")
        dense = self.first_dense_layers if self.experts else 0
        every = _layers_of(self.mixers, feeds, dense, self.layers)
        return _counted(every if count is None else every[start : start + count])

    def _number(self, letters: str) -> int:
        return sum(n for pair, n in self.kinds().items() if set(letters) & set(pair))

    @property
    def dense_layers(self) -> int:
        """Layers with one feed-forward block for all tokens."""
        return self._number("d")

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self._number("e")

    @property
    def caching_layers(self) -> int:
        """Layers whose KV cache grows with the context."""
        return self._number("fi")

    @property
    def plain(self) -> bool:
        """Whether no layer has a window or a state."""
        return not self._number("ws")

    @property
    def expert_bits(self) -> float:
        """Bits of a weight of the routed experts where they alone ship in a narrower type; or 0."""
        found = self.stated
        return found.experts if found and found.precision == "fp16" and self.experts else 0.0

    # Parameters -----------------------------------------------------------------------------

    def attention_products(self, mixer: str = "f") -> dict[str, int]:
        """Parameters of the matrix products of one layer's attention, by their usual names."""
        h = self.hidden
        if mixer in "s-":
            return {"in_proj": self.state_params} if mixer == "s" else {}
        index = self.index_heads * self.index_dim * (self.q_lora_rank or h)
        index += h * (self.index_dim + self.index_heads * self.latent)
        found = {"indexer.wq_b": index} if mixer == "i" else {}
        dim, kv_heads = self._kv_heads(mixer)
        value = self.v_head_dim or dim
        gate = h * self.heads * value if self.output_gate else 0
        if not self.latent:
            return found | {
                "q_proj": h * self.heads * dim + gate,
                "k_proj": h * kv_heads * dim,
                "v_proj": 0 if self.keys_are_values and mixer != "w" else h * kv_heads * value,
                "o_proj": self.heads * value * h,
            }
        q_width = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        return found | {
            "q_a_proj": self.q_lora_rank * h,
            "q_b_proj": (self.q_lora_rank or h) * q_width,
            "kv_a_proj_with_mqa": h * (self.kv_lora_rank + self.qk_rope_head_dim),
            "kv_b_proj": self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + value),
            "o_proj": self.heads * value * h + gate,
        }

    def _kv_heads(self, mixer: str) -> tuple[int, int]:
        """Size and number of the KV heads of a layer."""
        window = mixer == "w"
        return (
            (window and self.window_head_dim) or self.head_dim,
            (window and self.window_kv_heads) or self.kv_heads,
        )

    @property
    def attention_params(self) -> int:
        """Parameters in the matrix products of one layer's attention projections, at the mean."""
        return self.layer_params().attention // self.layers

    @property
    def mlp_params(self) -> int:
        """Parameters in the matrix products of a dense layer's feed-forward block."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @property
    def expert_params(self) -> int:
        """Parameters of one expert of one layer."""
        width = self.expert_hidden or self.hidden
        return (3 if self.gated_mlp else 2) * width * self.moe_intermediate

    @property
    def head_params(self) -> int:
        """Parameters in the product that turns the last hidden state into token logits."""
        return self.hidden * self.vocab

    @property
    def matmul_params(self) -> int:
        """Parameters that one token meets in matrix products: all but lookups, norms and biases.

        The logits' product is included; in prefill only the last token of a request needs it.
        """
        visited = self.layer_params()
        visited = visited._replace(rest=self.moe_layers * self.hidden * self.experts)
        idle = self.moe_layers * (self.experts - self.experts_active) * self.expert_params
        return sum(visited) - idle + self.head_params

    def layer_params(
        self, start: int = 0, count: int | None = None, tensor_parallel: int = 1
    ) -> LayerParams:
        """Parameters of ``count`` layers from ``start``, by default all; all experts included.

        Those that tensor parallelism copies count as often as there are copies: projections of KV
        heads where there are fewer than GPUs, and the down-projections of latent attention.
        """
        if not 0 <= start < self.layers:
            raise ParameterError(
                f"Model '{self.name}' has no layer {start}.",
                resolve=f"use 0 to {self.layers - 1}.",
            )
        attention = dense = experts = shared = rest = 0
        for (mixer, feed), n in self.kinds(start, count).items():
            products = self.attention_products(mixer)
            attention += n * sum(products.values())
            if self.latent and mixer in "fi":
                down = products["q_a_proj"] + products["kv_a_proj_with_mqa"]
                attention += n * (tensor_parallel - 1) * down
            elif mixer in "fiw":
                heads = self._kv_heads(mixer)[1]
                copies = tensor_parallel * math.ceil(heads / tensor_parallel) - heads
                attention += n * copies * (products["k_proj"] + products["v_proj"]) // heads
            rest += n * self._vectors(mixer, feed)
            if feed == "d":
                dense += n * self.mlp_params
            elif feed == "e":
                experts += n * self.experts * self.expert_params
                shared += n * self.shared_experts * self.expert_params
                shared += n * 2 * self.hidden * self.expert_hidden
                rest += n * self.hidden * self.experts
        return LayerParams(attention, dense, experts, shared, rest)

    def _vectors(self, mixer: str, feed: str) -> int:
        """Norms and biases of one layer."""
        norms = self.hidden * (2 if self.biases == "all" else 1) * (2 - (mixer + feed).count("-"))
        if feed == "d" and self.biases == "all":
            norms += self.intermediate * (2 if self.gated_mlp else 1) + self.hidden
        if mixer in "s-":
            return norms
        dim, kv_heads = self._kv_heads(mixer)
        norms += self.q_lora_rank + self.kv_lora_rank + (2 * dim if self.qk_norm else 0)
        qkv = (self.heads + 2 * kv_heads) * dim if self.biases != "none" else 0
        return norms + qkv + (self.hidden if self.biases in ("attention", "all") else 0)

    @property
    def embedding_params(self) -> int:
        """Parameters before the first layer: token and position tables and their norm."""
        norm = 2 * self.hidden if self.embedding_norm else 0
        return self.hidden * (self.vocab + self.learned_positions) + norm

    @property
    def output_params(self) -> int:
        """Parameters after the last layer: its norm, and the logits' matrix unless tied."""
        norm = self.hidden * (2 if self.biases == "all" else 1)
        return norm + (0 if self.tied_embeddings else self.head_params)

    @property
    def params(self) -> int:
        """All parameters, counted from the shape (symbol Phi of Xiong et al.)."""
        return self.embedding_params + sum(self.layer_params()) + self.output_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the experts it does not visit."""
        idle = self.moe_layers * (self.experts - self.experts_active) * self.expert_params
        return self.params - idle

    # Bytes ----------------------------------------------------------------------------------

    @property
    def stated(self) -> WeightFormat | None:
        """Format that its checkpoint states, or checkpoints are published in; None for 16 bits."""
        return self.weights or (weight_format(self.ships) if self.ships else None)

    @property
    def precision(self) -> str:
        """Data type that its checkpoint states, the default wherever weights are loaded."""
        return self.stated.precision if self.stated else "fp16"

    def loaded_as(self, asked: str) -> str:
        """Data type of the weights, where one or a format is asked for; its own where none is."""
        found = self.format(asked) if asked else self.stated
        require(
            found is None or found.name != "mxfp4" or found is self.stated,
            f"{self.name} is not published in mxfp4.",
            resolve="leave the precision out, or use another.",
        )
        return asked if asked in PRECISION_BITS else found.precision if found else "fp16"

    def format(self, precision: str) -> WeightFormat:
        """Its checkpoint's format where that is of a data type, else the usual one of that type."""
        found = self.stated
        same = found and precision in (found.precision, found.name)
        if found and (same or (found.precision, precision) == ("fp16", "bf16")):
            return found
        return weight_format(precision)

    def weight_bytes(self, precision: str = "fp16") -> int:
        """Bytes of all weights of a checkpoint in a precision, scales and zero points included.

        Embedding, head, norms and routers stay in 16 bits in quantised ones.
        """
        kept = self.format(precision)
        return kept.bytes(self.layer_params()) + self.end_bytes(precision, first=True, last=True)

    def end_bytes(self, precision: str, *, first: bool, last: bool) -> int:
        """Bytes of weights outside the layers: embedding first, logits last.

        A tied matrix is needed at both ends, and counts once where they are one.
        """
        params = (self.embedding_params if first else 0) + (self.output_params if last else 0)
        params += self.head_params if self.tied_embeddings and last and not first else 0
        kept = self.format(precision)
        own = kept is self.format(self.precision) or (not self.stated and precision == "bf16")
        return kept.bytes(LayerParams(rest=params)) + (self.other_bytes if first and own else 0)

    def layer_weight_bytes(self, precision: str = "fp16") -> int:
        """Bytes of one layer's weights; in a mixture of experts, of a layer that has experts."""
        return self.format(precision).bytes(self.layer_params(self.layers - 1, 1))

    def kv_values_per_token_layer(self, formula: KvFormula = "model") -> int:
        """Cached numbers per token and layer.

        ``2 kv_heads head_dim`` with (grouped) keys and values, ``kv_lora_rank +
        qk_rope_head_dim`` with latent attention; ``2 hidden`` under formula ``"full"``.
        """
        if formula == "full":
            return 2 * self.hidden
        if formula != "model":
            raise ParameterError(
                f"No KV formula is called '{formula}'.",
                resolve="use 'model' (as the model caches) or 'full' (2 l h, as papers print).",
            )
        return self.cached_values("f")

    def cached_values(self, mixer: str, tensor_parallel: int = 1) -> int:
        """Cached numbers per token in one layer, on all GPUs that share it."""
        if mixer in "s-":
            return 0
        if self.latent:
            return tensor_parallel * (self.kv_lora_rank + self.qk_rope_head_dim)
        dim, heads = self._kv_heads(mixer)
        return (
            tensor_parallel * math.ceil(heads / tensor_parallel) * (dim + (self.v_head_dim or dim))
        )

    def kv_bytes_per_token(
        self, precision: str = "fp16", formula: KvFormula = "model", tensor_parallel: int = 1
    ) -> int:
        """Bytes of KV cache per token in all layers whose cache grows with the context.

        Parameters
        ----------
        formula
            ``"model"``: what the model caches, grouped-query and latent attention included.
            ``"full"``: ``2 l h`` values per token, as Xiong et al. (eq. 5 and 8) and
            HeteroServe (eq. 1) print, whatever the attention.
        tensor_parallel
            GPUs that share every layer: each holds at least one KV head, and with latent attention
            the whole vector. Formula ``"full"`` is divided evenly.

        Source: HeteroServe, eq. 1: KV cache of a request; KV(r_j).

        Examples
        --------
        >>> [llm("Qwen3-30B-A3B").kv_bytes_per_token(tensor_parallel=t) for t in (1, 4, 8)]
        [98304, 98304, 196608]
        >>> 1024 * llm("LLaMA-1-30B").kv_bytes_per_token() / 1e9  # ThunderServe, Table 8: 1.64 GB
        1.63577856
        """
        if formula != "model":
            return bytes_of(self.layers * self.kv_values_per_token_layer(formula), precision)
        values = self._number("fi") * self.cached_values("f", tensor_parallel)
        index = self._number("i") * tensor_parallel * (self.index_dim + _INDEX_SCALE_BYTES)
        return bytes_of(values, precision) + index

    def request_bytes(
        self,
        tokens: int,
        precision: str = "fp16",
        *,
        step_tokens: int = 0,
        tensor_parallel: int = 1,
    ) -> int:
        """Bytes that a request holds beside its growing cache: windows and states.

        A windowed layer keeps the tokens of its window and those of a step before they leave it.

        Examples
        --------
        >>> llm("gpt-oss-20b").request_bytes(16384) == 128 * llm("gpt-oss-20b").kv_bytes_per_token()
        True
        """
        kept = min(tokens, self.window + step_tokens)
        windows = self._number("w") * self.cached_values("w", tensor_parallel) * kept
        return bytes_of(windows, precision) + self._number("s") * self.state_bytes

    def activation_bytes_per_token(self, precision: str = "fp16") -> int:
        """Bytes per token that cross from one layer to the next."""
        return bytes_of(self.hidden, precision)

    # Operations -----------------------------------------------------------------------------

    def attention_flops_per_pair(self, *, absorbed: bool = False) -> int:
        """Floating-point operations per pair of query and cached token, all caching layers.

        ``4 heads head_dim layers``: one product for the score, one for the weighted sum. With
        latent attention ``2 heads (qk_nope + qk_rope + v) layers`` when keys and values are
        expanded (prefill), and ``2 heads (2 kv_lora_rank + qk_rope) layers`` when the expansion
        is absorbed into the projections (decode).
        """
        if not self.latent:
            value = self.v_head_dim or self.head_dim
            return 2 * self.heads * (self.head_dim + value) * self.caching_layers
        width = (
            2 * self.kv_lora_rank + self.qk_rope_head_dim
            if absorbed
            else self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        )
        return 2 * self.heads * width * self.caching_layers

    # Display --------------------------------------------------------------------------------

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of models shows of each."""
        return (
            Column("model", of="name"),
            Column("parameters", "1e9", 5, of=lambda m: m.params / 1e9),
            Column("active", "1e9", of=lambda m: m.active_params / 1e9),
            Column("layers"),
            Column("hidden"),
            Column("heads"),
            Column("KV heads", of=lambda m: None if m.latent else m.kv_heads),
            Column(
                "experts",
                of=lambda m: f"{m.experts_active} of {m.experts}" if m.experts else None,
            ),
            Column("KV per token, fp16", "bytes", of=lambda m: m.kv_bytes_per_token()),
            Column("checked"),
        )

    def table(self) -> Table:
        """The model as one line."""
        source = f"Source: {self.source}." if self.source else ""
        return Table.of("", self.columns(), [self], source, self.notes)


@lru_cache(maxsize=1)
def llms() -> Records[Llm]:
    """All models of ``data/specs/models.csv``."""
    return read_table(paths.data("specs", "models.csv"), "model", Llm)


def llm(name: str) -> Llm:
    """Model of that name or alias.

    Raises
    ------
    CatalogError
        If there is none, with the nearest names.

    Examples
    --------
    >>> llm("LLaMA-30B").name
    'LLaMA-1-30B'
    """
    return llms().find(name)


def find_llm(name: str | Path) -> Llm:
    """Model of a checkpoint's folder or ``config.json``, of the catalog, or of Hugging Face's hub.

    Of a name in the catalog with more behind it, such as ``-Instruct`` or ``-FP8``, it is that
    model in that format; other names of the form ``owner/name`` are looked up on the hub.

    Raises
    ------
    CatalogError, DataError
        If there is none, or the config cannot be read.

    Examples
    --------
    >>> found = find_llm("Qwen/Qwen2.5-32B-Instruct-AWQ")
    >>> found.name, found.precision, round(found.weight_bytes("int4") / 2**30, 1)
    ('Qwen2.5-32B-Instruct-AWQ', 'int4', 18.0)
    """
    if isinstance(name, Path) or name.endswith(".json") or (name and Path(name).is_dir()):
        return Llm.from_config(name)
    last = name.rpartition("/")[2]
    for one in (name, last, _SAME_SHAPE.sub("", last)):
        if found := llms().get(one):
            break
    else:
        if _HUB_NAME.fullmatch(name):
            from hetero.catalog import checkpoints

            return Llm.from_config(checkpoints.hub_folder(name))
        return llm(name)
    form = next((one for one in last.lower().split("-") if one in weight_formats()), "")
    return replace(found, name=last, ships=form) if form and form != found.ships else found


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# What names have behind them that says nothing of the shape.
_SAME_SHAPE = re.compile(
    r"-(instruct|chat|it|hf|base|int[48]|fp8|awq|gptq|(nv|mx)fp4|w4a16|w8a8)(?=-|$)", re.IGNORECASE
)
