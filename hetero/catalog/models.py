"""Language models: their shape, and the parameters, bytes and operations that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hetero import paths
from hetero.catalog.precision import bytes_of
from hetero.catalog.tables import Records, read_table
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError, ParameterError

KvFormula = Literal["model", "full"]


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
    expert_bits
        Bits of a weight of the routed experts, scales included, where they are published in a
        narrower type than the rest (4.25 of gpt-oss, mxfp4); 0 where all weights have one type.
    windowed_layers
        Layers that look back over a short window alone and keep no more of the KV cache.
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
    expert_bits: float = 0.0
    windowed_layers: int = 0
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
        if self.heads % self.kv_heads:
            self._refuse(
                f"{self.heads} heads for {self.kv_heads} KV heads",
                "give a number of KV heads that divides the heads",
            )
        if self.windowed_layers >= self.layers:
            self._refuse(
                f"{self.windowed_layers} windowed of {self.layers} layers",
                "leave one that looks back over everything",
            )
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

    @property
    def dense_layers(self) -> int:
        """Layers with one feed-forward block for all tokens; the leading ones."""
        return self.first_dense_layers if self.experts else self.layers

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def caching_layers(self) -> int:
        """Layers whose KV cache grows with the context."""
        return self.layers - self.windowed_layers

    # Parameters -----------------------------------------------------------------------------

    @property
    def attention_params(self) -> int:
        """Parameters in the matrix products of one layer's attention projections."""
        if not self.latent:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        q_width = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        query = self.q_lora_rank * (self.hidden + q_width) or self.hidden * q_width
        down = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + self.heads * self.v_head_dim * self.hidden

    @property
    def mlp_params(self) -> int:
        """Parameters in the matrix products of a dense layer's feed-forward block."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @property
    def expert_params(self) -> int:
        """Parameters of one expert of one layer."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.moe_intermediate

    @property
    def head_params(self) -> int:
        """Parameters in the product that turns the last hidden state into token logits."""
        return self.hidden * self.vocab

    @property
    def matmul_params(self) -> int:
        """Parameters that one token meets in matrix products: all but lookups, norms and biases.

        The logits' product is included; in prefill only the last token of a request needs it.
        """
        router = self.hidden * self.experts
        visited = (self.experts_active + self.shared_experts) * self.expert_params
        return (
            self.layers * self.attention_params
            + self.dense_layers * self.mlp_params
            + self.moe_layers * (router + visited)
            + self.head_params
        )

    def layer_params(self, index: int) -> int:
        """Parameters of one layer (0 is the first), biases, norms and all experts included."""
        if not 0 <= index < self.layers:
            raise ParameterError(
                f"Model '{self.name}' has no layer {index}.",
                resolve=f"use 0 to {self.layers - 1}.",
            )
        total = self.attention_params + self._layer_vectors
        if index < self.dense_layers:
            return total + self.mlp_params + self._mlp_biases
        experts = self.experts + self.shared_experts
        return total + self.hidden * self.experts + experts * self.expert_params

    @property
    def _layer_vectors(self) -> int:
        """Norms and attention biases of one layer."""
        norms = self.hidden * (4 if self.biases == "all" else 2)
        norms += self.q_lora_rank + self.kv_lora_rank
        norms += 2 * self.head_dim if self.qk_norm else 0
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim if self.biases != "none" else 0
        return norms + qkv + (self.hidden if self.biases in ("attention", "all") else 0)

    @property
    def _mlp_biases(self) -> int:
        if self.biases != "all":
            return 0
        return self.intermediate * (2 if self.gated_mlp else 1) + self.hidden

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
        dense = self.dense_layers * self.layer_params(0) if self.dense_layers else 0
        moe = self.moe_layers * self.layer_params(self.layers - 1) if self.moe_layers else 0
        return self.embedding_params + dense + moe + self.output_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the experts it does not visit."""
        idle = self.moe_layers * (self.experts - self.experts_active) * self.expert_params
        return self.params - idle

    # Bytes ----------------------------------------------------------------------------------

    def weight_bytes(self, precision: str = "fp16") -> int:
        """Bytes of all weights, ``params`` times the bytes of one value.

        Scales of quantised formats and layers kept in a wider format are not counted.
        """
        return self.bytes_of_params(self.params, self.moe_layers, precision)

    def bytes_of_params(self, params: int, moe_layers: int, precision: str = "fp16") -> int:
        """Bytes of ``params`` parameters, among them the routed experts of so many layers."""
        if not self.expert_bits:
            return bytes_of(params, precision)
        routed = moe_layers * self.experts * self.expert_params
        return bytes_of(params - routed, precision) + math.ceil(routed * self.expert_bits / 8)

    def layer_weight_bytes(self, precision: str = "fp16") -> int:
        """Bytes of one layer's weights; in a mixture of experts, of a layer that has experts."""
        params = self.layer_params(self.layers - 1)
        return self.bytes_of_params(params, min(1, self.moe_layers), precision)

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
        if self.latent:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, precision: str = "fp16", formula: KvFormula = "model") -> int:
        """Bytes of KV cache per token, all layers but windowed ones, one copy.

        Parameters
        ----------
        formula
            ``"model"``: what the model caches, grouped-query and latent attention included.
            ``"full"``: ``2 l h`` values per token, as Xiong et al. (eq. 5 and 8) and
            HeteroServe (eq. 1) print, whatever the attention.
        """
        layers = self.layers if formula == "full" else self.caching_layers
        return bytes_of(layers * self.kv_values_per_token_layer(formula), precision)

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
            return 4 * self.heads * self.head_dim * self.caching_layers
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
    """Model from a Hugging Face config if ``name`` is a file or folder, else of the catalog.

    Raises
    ------
    CatalogError, DataError
        If there is neither, or the config cannot be read.
    """
    if isinstance(name, Path) or name.endswith(".json") or Path(name).is_dir():
        return Llm.from_config(name)
    return llm(name)
