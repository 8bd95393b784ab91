r"""Step times from the spec sheet, with every efficiency explicit.

One step of a replica on ``t`` GPUs with ``n`` new tokens, ``c`` cached tokens read by decoding
requests and ``pairs`` prefill query-key pairs takes

.. math::
    step\_s = \max\!\Big(\frac{2 P (n + n_{pad})}{t\,\eta_c F}, \frac{W}{t\,\eta_w B}\Big)
      + \frac{W_{head}}{t\,\eta_w B}
      + \frac{K c}{\min(t, h_{kv})\,\eta_k B} + \frac{A\, pairs}{t\,\eta_a F}
      + 2 l \Big(\frac{2(t-1)}{t}\frac{2 h\, n}{\eta_l N} + 2 (t-1) \lambda\Big) + l\, o_l + o_s

with peak compute ``F`` [FLOP/s], memory bandwidth ``B`` and link bandwidth ``N`` per direction
[bytes/s]; ``P`` the parameters that a token meets in the layers' matrix products, ``W`` and
``W_head`` the bytes of their weights and of the logits', ``K`` the KV bytes per token, ``A`` the
attention operations per pair, ``l`` layers, ``h`` the hidden size, ``h_kv`` KV heads. Tensor
parallelism sums activations twice per layer over a ring: each GPU sends ``2 (t-1) / t`` of the 2
``h n`` bytes in ``2 (t-1)`` hops of latency ``lambda``. ``n_pad`` tokens of padding stand for the
tiles that matrix kernels round up to: without them, batches of 50 to 500 tokens come out too fast
on every GPU measured. Weights in fewer bits than they are multiplied in have as much less of it:
small batches stay bound by those fewer bytes. The logits' product is counted as bytes only; one row
per request of it is computed, not one per token.

In a mixture of experts the first maximum is of what every token meets, and the routed experts add
their own. A token visits ``k`` of ``E`` experts of ``P_e`` parameters and ``W_e`` bytes in each of
``l_e`` layers; with independent choices ``n`` tokens touch ``E_n`` of them:

.. math::
    E_n = E \big(1 - (1 - k/E)^n\big), \quad
    experts\_s = \frac{2 l_e k P_e\, n}{t\,\eta_c \epsilon_c F}
      + \frac{l_e E_n W_e}{t\,\eta_w \epsilon_w B} + l_e\, o_e

with the shares ``epsilon`` of what dense products reach, and the time ``o_e`` of a layer's routing.
They add up: experts differ in their tokens, and tables of kernels lie nearer to the sum than to
the larger on every GPU measured (``data/measured/experts.csv``).

Whole experts may be spread over all ``g`` GPUs of a group instead (expert parallelism), of which
``d = g / t`` ranks have attention and dense products for tokens of their own. Ranks run in
lockstep, so that the fullest counts: :math:`\lceil b / d \rceil` of ``b`` decoding requests and,
since a prompt is not shared out, :math:`\min(p, \max(p / d, I))` of ``p`` prefill tokens of prompts
of ``I`` tokens. (Ranks balanced to the token, ``I = 0``, would be up to 2.4 times as fast.) The
GPU with most of the ``k n`` visits of all ranks counts, and the one that reads most experts: of
``g`` loads of mean ``m`` and variance ``v``

.. math::
    \max \approx m + \sqrt{2 v \ln g}, \qquad
    (m, v) = \Big(\frac{k n}{g}, \frac{k n}{g}\Big), \quad
    \Big(\frac{E_n}{g}, \frac{E_n}{g}\big(1 - \frac{E_n}{E}\big)\Big)

(Raab and Steger, Balls into Bins, 1998, for visits; neither exceeds what a GPU can get). Where
``d > 1`` the tokens of all ranks are gathered at every GPU and the sums of experts scattered back
(all-gather and reduce-scatter, what engines do unless told otherwise), in place of a quarter of the
all-reduces of such a layer (the sum after the experts leaves each GPU its part of the tokens):

.. math::
    exchange\_s = 2 l_e \Big(\frac{2 h}{\eta_l N} \Big(n - \frac{n - n_1}{(d - 1)\,t}\Big)
      + (g - 1) \lambda\Big)

with the ``n_1`` tokens of the fullest rank, which the others share the rest of: what the emptiest
GPU lacks arrives there. As vLLM's ``allgather_reducescatter``, its guide to expert parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.catalog import Gpu, Llm
from hetero.catalog.precision import bytes_of
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError, require
from hetero.latency.step import Piece, StepModel

_SHORT_WINDOW = 128
_MANY = 2.0**40  # tokens or pairs of a step whose time is its rate
_MOST_DECODING = 1024  # requests up to which ranks are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency(Shown):
    """What a GPU and its engine reach of the spec sheet.

    Attributes
    ----------
    compute_efficiency
        Share of peak compute in the matrix products of the layers.
    bandwidth_efficiency, kv_efficiency
        Share of memory bandwidth when reading weights, and when reading cached keys and values.
    attention_efficiency
        Share of peak compute in prefill attention.
    link_efficiency
        Share of link bandwidth in the all-reduce of tensor parallelism.
    padding_tokens
        Tokens that matrix kernels compute beyond those of the step.
    layer_overhead_s, step_overhead_s
        Time per layer and per step that no other term explains (launches, norms, scheduling) [s].
    hop_latency_s
        Latency of one hop of the all-reduce [s].
    estimated
        Names of the values above that no measurement of this GPU determined.
    source, provenance
        Where the values come from; ``derived`` when fitted to measurements of this type of GPU,
        ``estimated`` when carried over from others, ``assumed`` when set by hand.
    """

    compute_efficiency: float
    bandwidth_efficiency: float
    kv_efficiency: float
    attention_efficiency: float
    link_efficiency: float
    padding_tokens: float
    layer_overhead_s: float
    step_overhead_s: float
    hop_latency_s: float
    estimated: tuple[str, ...] = ()
    source: str = "set by hand"
    provenance: str = "assumed"

    def __post_init__(self) -> None:
        for name in VALUES:
            value = getattr(self, name)
            if not (0 <= value < float("inf")) or (name.endswith("efficiency") and value == 0):
                raise ParameterError(
                    f"{name} = {value} is no efficiency of a GPU.",
                    resolve="give a share above 0, and times and tokens of 0 or more.",
                )

    @classmethod
    def of(
        cls,
        values: Iterable[float],
        *,
        estimated: tuple[str, ...] = (),
        source: str = "set by hand",
        provenance: str = "assumed",
    ) -> Efficiency:
        """Efficiency of nine values in the order of :data:`VALUES`."""
        return cls(
            **dict(zip(VALUES, map(float, values), strict=True)),
            estimated=estimated,
            source=source,
            provenance=provenance,
        )

    @property
    def values(self) -> Floats:
        """The nine values in the order of :data:`VALUES`."""
        return np.array([getattr(self, name) for name in VALUES])

    def table(self) -> Table:
        """One row per value, and whether a measurement determined it."""
        rows = []
        for name in VALUES:
            value, unit = getattr(self, name), "share of peak"
            if name.endswith("_s"):
                value, unit = 1e6 * value, "µs"
            elif name == "padding_tokens":
                unit = "tokens"
            state = "estimated" if name in self.estimated else self.provenance
            rows.append((name.removesuffix("_s").replace("_", " "), float(value), unit, state))
        columns = (Column("value of"), Column("value", digits=3), Column("unit"), Column("is"))
        return Table("Efficiency", columns, tuple(rows), (self.source,))


VALUES = tuple(field.name for field in fields(Efficiency) if field.type == "float")
"""Names of the nine numbers of an :class:`Efficiency`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertEfficiency:
    """What the kernels of routed experts reach of what an engine's dense products do.

    Attributes
    ----------
    compute_share, bandwidth_share
        Of the efficiencies of compute and of bandwidth in dense products.
    layer_s
        Time per layer of routing, sorting and summing, and of what latent attention takes beyond
        dense layers [s].
    """

    compute_share: float = 1.0
    bandwidth_share: float = 1.0
    layer_s: float = 0.0


def _largest(mean: Floats, variance: Floats, parts: int) -> Floats:
    """About what the largest of so many equal loads is, see the module."""
    return np.asarray(mean + np.sqrt(2.0 * variance * np.log(parts)))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Roofline(Shown):
    """Step times of one replica from the spec sheet of its GPU.

    Attributes
    ----------
    tensor_parallel
        GPUs that share every layer.
    precision, kv_precision
        Of the weights and of the cache. Products run at the peak rate of the weights' precision
        where the GPU computes in it and the catalog has that rate, else at the fp16 rate (weights
        converted on the fly, as int8 and int4 always are); attention runs at the fp16 rate.
    experts
        Of the routed experts of a mixture.
    expert_ranks
        Ranks of ``tensor_parallel`` GPUs with attention of their own that spread whole experts over
        all their GPUs; 0: the experts of one rank are shared as all its layers are.
    prompt_tokens
        Of a prompt, which one of these ranks takes whole.
    layers
        Layers held, ``None`` for all of them; a part of the model has no logits and no overhead
        per step.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> from hetero.latency import for_gpu
    >>> replica = for_gpu(gpu("A100-SXM-80GB"), llm("Llama-3.1-8B"))
    >>> bool(0.008 < replica.step_model().decode_seconds([1024]) < 0.016)
    True
    """

    gpu: Gpu
    llm: Llm
    efficiency: Efficiency
    tensor_parallel: int = 1
    precision: str = "fp16"
    kv_precision: str = "fp16"
    layers: int | None = None
    experts: ExpertEfficiency = ExpertEfficiency()
    expert_ranks: int = 0
    prompt_tokens: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.expert_ranks == 0 or 0 < self.gpus <= self.llm.experts,
            f"{self.llm.experts} experts of {self.llm.name} are not spread over {self.gpus} GPUs.",
            resolve="spread experts of a mixture, at least one to each GPU.",
        )
        require(
            self.tensor_parallel >= 1,
            f"A replica on {self.tensor_parallel} GPUs does not exist.",
            resolve="give a tensor-parallel degree of 1 or more.",
        )
        if self.layers is not None and not 1 <= self.layers <= self.llm.layers:
            raise ParameterError(
                f"{self.llm.name} has {self.llm.layers} layers; received layers = {self.layers}.",
                resolve=f"give 1 to {self.llm.layers}, or None for the whole model.",
            )

    # Work of a step, per GPU ----------------------------------------------------------------

    @property
    def _held(self) -> int:
        return self.llm.layers if self.layers is None else self.layers

    @property
    def gpus(self) -> int:
        """GPUs of all ranks."""
        return self.tensor_parallel * max(1, self.expert_ranks)

    @property
    def _share(self) -> float:
        return self._held / self.llm.layers

    @property
    def _flops(self) -> float:
        native = self.precision in self.gpu.rated
        return 1e12 * self.gpu.peak_tflops(self.precision if native else "fp16")

    @property
    def padding_tokens(self) -> float:
        """Tokens of padding of a step's dense products.

        Not fitted: with 4-bit weights on an A10G (``data/measured/servers.csv``, GPTQ and Marlin)
        TPOT would err by 200 % and more with all of it, and errs by 8 to 21 % below saturation.
        """
        dense, own = self.llm.layer_params()._replace(experts=0), self.precision
        multiplied = bytes_of(sum(dense), own if own in self.gpu.rated else "fp16")
        return self.efficiency.padding_tokens * min(
            1.0, self.llm.format(own).bytes(dense) / multiplied
        )

    @property
    def _bandwidth(self) -> float:
        return 1e9 * self.gpu.mem_bw_gbs

    @property
    def _weight_bytes(self) -> float:
        """Bytes on one GPU of the layers' weights that every step reads."""
        model = self.llm
        layers = model.format(self.precision).bytes(model.layer_params()._replace(experts=0))
        return self._share * layers / self.tensor_parallel

    @property
    def _kept_bytes(self) -> float:
        """Bytes that decoding a token reads, and writes, of windows and states of its request.

        What shares were fitted to (gpt-oss) has such short windows that they hold them already.
        """
        model = self.llm
        states = model.request_bytes(0)
        windows = model.request_bytes(model.window, self.kv_precision) - states
        return self._share * (2.0 * states + windows * (model.window > _SHORT_WINDOW))

    def _experts(self, tokens: Floats) -> Floats:
        """Time [s] of the routed experts of a step of so many tokens."""
        e, own, model = self.efficiency, self.experts, self.llm
        parts = self.gpus if self.expert_ranks else 1
        share = self._share * model.moe_layers * model.expert_params
        share /= 1 if self.expert_ranks else self.tensor_parallel
        held, active = model.experts / parts, model.experts_active
        touched = 1.0 - (1.0 - active / model.experts) ** np.maximum(tokens, 1.0)
        visits, read = active * tokens / parts, held * touched
        visits = np.minimum(_largest(visits, visits, parts), min(active, held) * tokens)
        read = np.minimum(_largest(read, read * (1.0 - touched), parts), held)
        per_value = model.format(self.precision).experts / 8
        flops = self._flops * e.compute_efficiency * own.compute_share
        bandwidth = self._bandwidth * e.bandwidth_efficiency * own.bandwidth_share
        computing = 2.0 * share * visits / flops
        reading = share * read * per_value / bandwidth
        return np.asarray(computing + reading + self._share * model.moe_layers * own.layer_s)

    def terms(
        self,
        tokens: ArrayLike,
        decoding: ArrayLike = 0,
        cached: ArrayLike = 0.0,
        pairs: ArrayLike = 0.0,
    ) -> dict[str, Floats]:
        """Every term of the step [s]; products and weights overlap, the rest adds to the larger.

        Arguments as in :meth:`StepModel.seconds`; ``decoding`` says how many ranks read the cache.
        """
        every, b, c, q = np.broadcast_arrays(
            *(np.asarray(a, dtype=np.float64) for a in (tokens, decoding, cached, pairs))
        )
        n, ranks = every, max(1, self.expert_ranks)
        if ranks > 1:
            prefill = np.maximum(every - b, 0.0)
            whole = np.minimum(prefill, np.maximum(prefill / ranks, self.prompt_tokens))
            n = np.ceil(b / ranks) + whole
            c = c * np.where(b > 0, np.ceil(b / ranks) / np.maximum(b, 1.0), 1.0 / ranks)
            q = q / ranks + (whole - prefill / ranks) * self.prompt_tokens / 2.0
        e, model, t, held = self.efficiency, self.llm, self.tensor_parallel, self._held
        routed = model.moe_layers * model.experts_active * model.expert_params
        compute = 2.0 * (model.matmul_params - model.head_params - routed) * self._share / t
        form = model.format(self.precision)
        # The efficiencies of fp8 were fitted with logits in fp8.
        per_value = form.rest / 8 if form.dense < 8 else bytes_of(1024, self.precision) / 1024
        head = per_value * model.head_params / t if self.layers is None else 0.0
        copies = t / min(t, 1 if model.latent else model.kv_heads)
        kv = model.kv_bytes_per_token(self.kv_precision) * self._share * copies / t
        attention = model.attention_flops_per_pair() * self._share / t
        kept = self._kept_bytes
        size, link = model.activation_bytes_per_token("fp16"), 1e9 * self.gpu.link_gbs
        spread = self._share * model.moe_layers if ranks > 1 else 0
        reduces = 2 * held - spread / 2 if spread else 2 * held
        sent, hops = reduces * (2.0 * (t - 1) / t) * size, reduces * 2 * (t - 1)
        one = np.ones_like(n)
        step = e.step_overhead_s if self.layers is None else 0.0
        experts = {"experts": self._experts(every)} if model.experts else {}
        if spread:
            # All but what the emptiest rank has arrives at each of its GPUs, and goes back.
            away = size * (every - (every - n) / (ranks - 1) / t)
            hop = (self.gpus - 1) * e.hop_latency_s
            experts["exchange"] = 2 * spread * (away / (link * e.link_efficiency) + hop)
        return {
            "products": compute * (n + self.padding_tokens) / (self._flops * e.compute_efficiency),
            "weights": self._weight_bytes / (self._bandwidth * e.bandwidth_efficiency) * one,
            **experts,
            "logits": head / (self._bandwidth * e.bandwidth_efficiency) * one,
            "kv cache": (kv * c + kept * b / ranks / t) / (self._bandwidth * e.kv_efficiency),
            # Scores and values are products of activations, whatever the weights are stored in.
            "attention": attention * q / (1e12 * self.gpu.fp16_tflops * e.attention_efficiency),
            "all-reduce": sent * n / (link * e.link_efficiency) + hops * e.hop_latency_s,
            "overhead": (held * e.layer_overhead_s + step) * one,
        }

    def seconds(
        self,
        tokens: ArrayLike,
        decoding: ArrayLike = 0,
        cached: ArrayLike = 0.0,
        pairs: ArrayLike = 0.0,
    ) -> Floats:
        """Time [s] of a step; arguments as in :meth:`StepModel.seconds`."""
        terms = self.terms(tokens, decoding, cached, pairs)
        total = np.maximum(terms.pop("products"), terms.pop("weights"))
        for term in terms.values():
            total = total + term
        return total

    # Reduction ------------------------------------------------------------------------------

    @property
    def bend_tokens(self) -> float:
        """Tokens of a step at which computing takes as long as reading the weights."""
        terms = self.terms(np.array([0.0, 1.0]), np.array([0, 1]))
        slope = float(np.diff(terms["products"])[0])
        own = max(0.0, terms["weights"][1] / slope - self.padding_tokens)
        return float(max(1, self.expert_ranks) * own)

    @property
    def knots_tokens(self) -> Floats:
        """New tokens between which steps of the step model lie on straight lines."""
        bend = self.bend_tokens
        if not self.llm.experts:
            return np.array([0.0, bend, 2.0 * bend]) if bend > 0 else np.array([0.0, 1.0])
        # Weights read grow with the tokens until all experts are touched: no finite number of
        # knots is exact, and 4 per doubling are close.
        top = max(2.0 * bend, 4096.0 * self.llm.experts / self.llm.experts_active)
        knots = np.unique(np.append(np.geomspace(1.0, top, 4 * int(np.log2(top))), bend))
        knots = np.concatenate([[0.0], knots[knots >= 1.0], [2.0 * top]])
        if self.expert_ranks < 2:
            return knots
        turns = [self.prompt_tokens, self.expert_ranks * self.prompt_tokens]
        return np.unique([*knots, bend / self.expert_ranks, *turns])

    def experts_by_tokens(self) -> Floats:
        """New tokens, and the time of the routed experts with so many [s]; shape (2, K)."""
        knots = self.knots_tokens
        return np.array([knots, self._experts(knots)])

    def step_model(self) -> StepModel:
        """The step model this reduces to; exact for dense models."""
        knots = self.knots_tokens
        # Of one token or pair the difference would drown in the rounding of an empty step.
        rates = self.seconds([0.0, 0.0, 0.0], 0, [0.0, _MANY, 0.0], [0.0, 0.0, _MANY]) / _MANY
        cached_s, times, level = np.array([rates[1] - rates[0]]), self.seconds(knots), None
        if (own := self.expert_ranks) > 1 or self._kept_bytes:
            batch = np.arange(1.0, _MOST_DECODING + 1.0)
            cached_s = cached_s * max(1, own) * np.ceil(batch / max(1, own)) / batch
            level = self.seconds(batch, batch) - np.interp(batch, knots, times)
        return StepModel(
            (
                Piece(
                    knots,
                    times,
                    cached_s,
                    float(rates[2] - rates[0]),
                    decode_level_s=level,
                ),
            ),
            source=f"roofline of {self.llm.name} on {self.gpu.name}"
            + (f" x{self.gpus}" if self.gpus > 1 else "")
            + (f", experts spread by {own} rank{'s' * (own > 1)}" if own else "")
            + (", windows and states estimated" if self._kept_bytes else "")
            + (
                ", as if all tokens were read that its index chooses from"
                if self.llm.index_dim
                else ""
            )
            + f", {self.efficiency.source}",
            provenance=self.efficiency.provenance,
        )

    def table(self) -> Table:
        """Where the time goes: the terms of a few typical steps [ms]."""
        cases = (
            ("decode, batch 1", 1.0, 1.0, 1024.0, 0.0),
            ("decode, batch 64", 64.0, 64.0, 65536.0, 0.0),
            ("prefill of 512", 512.0, 0.0, 0.0, 512.0**2 / 2),
            ("prefill of 4,096", 4096.0, 0.0, 0.0, 4096.0**2 / 2),
        )
        rows = []
        for label, *arguments in cases:
            terms = {k: 1e3 * float(v) for k, v in self.terms(*arguments).items()}
            rows.append((label, *terms.values(), 1e3 * float(self.seconds(*arguments))))
        columns = (
            Column("step"),
            *(Column(name, "ms", 3) for name in self.terms(1.0)),
            Column("total", "ms", 3),
        )
        degree = f" x{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        held = "" if self.layers is None else f", {self.layers} layers"
        notes = (
            "total = larger of products and weights, plus the rest; contexts of 1,024 tokens",
            f"{self.efficiency.provenance}: {self.efficiency.source}",
        )
        title = f"Roofline of {self.llm.name}{held} on {self.gpu.name}{degree}"
        return Table(title, columns, tuple(rows), notes)
