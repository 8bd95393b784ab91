r"""Analytic latency of mixture-of-experts models with latent attention (DeepSeek-V3).

The formulas of shallowsim, with which Rignall's scheduler was evaluated, for any model of the
catalog and any GPU. One layer costs, in ms, with rates ``F`` [TFLOPS], ``B`` (memory), ``N``
(link) and ``P`` (network) [GB/s], each 85 % of the peak:

.. math::
    T_1 &= \frac{G}{0.7 F_8} + \frac{A}{0.7 F_{16}} + \frac{W}{B}, \qquad
    T_t = T_1 / t + [t > 1]\,(2 d n / N + 0.015) + 0.05 \\
    E_{shared} &= 6\,n\,d\,m / F + L, \qquad E_{routed} = 6\,K n\,d\,m / F + L\,g

with ``G`` and ``A`` the operations [GFLOP] of projections and of attention, ``W`` the attention
weights and ``L = 3 d m / B`` those of an expert, ``t`` the tensor-parallel degree, ``n`` tokens,
``d`` the hidden and ``m`` the inner size, ``K`` experts per token and ``g`` experts per GPU. With
fp4 units ``T_1 = G / F_4 + A / (0.7 F_{16})``. Tokens travel to their experts (dispatch D) and
back (combine C); what does not hide behind compute is added:

.. math::
    prefill &= l_d (T_1 + dense) + l_e (T_t + E_s + E_r + [C - T_t - E_s]^+ + [D - E_r]^+) \\
    TPOT &= l_d (T_1 + dense) + l_e (T_t + E_s + E_r + [D + C - T_t - E_s]^+)

In decode ``T`` contains the time to read the cache of the batch, and experts work on two
micro-batches at the efficiency of small products. What the program does oddly is listed, and
mended, by :class:`~hetero.latency.models.reference_quirks.Quirks`.

Notes
-----
The formulas are those of github.com/zartbot/shallowsim 0cec1f5 (Rignall, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.arrays import Floats
from hetero.display import Column, Table
from hetero.errors import require
from hetero.latency.models.moe_costs import MoeCosts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillTime:
    """Parts of a prefill; arrays of the broadcast shape of its arguments [ms], per layer.

    ``dense_attention_ms`` and ``dense_mlp_ms`` are of the leading dense layers; ``total_ms`` is
    the whole prefill, ``compute_ms`` and ``communication_ms`` its sums without overlap.
    """

    dense_attention_ms: Floats
    dense_mlp_ms: Floats
    attention_ms: Floats
    shared_ms: Floats
    routed_ms: Floats
    dispatch_ms: Floats
    combine_ms: Floats
    compute_ms: Floats
    communication_ms: Floats
    total_ms: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeTime:
    """Parts of a decode step; arrays of the broadcast shape of its arguments [ms], per layer.

    ``batch`` is the batch per GPU that ran, ``max_batch`` the largest that fits (negative where
    not even the weights do); where ``fits`` is False all times are NaN. ``delta_ms`` is the
    communication of a layer that does not hide, negative where it does; ``tpot_ms`` the step.
    """

    batch: Floats
    max_batch: Floats
    fits: NDArray[np.bool_]
    dense_attention_ms: Floats
    dense_mlp_ms: Floats
    attention_ms: Floats
    shared_ms: Floats
    routed_ms: Floats
    dispatch_ms: Floats
    combine_ms: Floats
    delta_ms: Floats
    compute_ms: Floats
    tpot_ms: Floats


@dataclass(frozen=True, slots=True, repr=False)
class MoeModel(MoeCosts):
    """Prefill and decode times of a model on islands of one GPU type.

    Its parameters, the model, the GPU and the quirks that are kept, are those of
    :class:`~hetero.latency.models.moe_costs.MoeCosts`.

    Source: Rignall, section 4.2: Shallowsim, step times of mixtures of experts; t_prefill, t_i.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.latency.models.moe_devices import moe_device
    >>> model = MoeModel(llm("DeepSeek-V3"), moe_device("H200"))
    >>> round(float(model.prefill(4383, tp=4, dp=8, hit_rate=0.563).total_ms), 3)
    163.456
    """

    # Prefill --------------------------------------------------------------------------------

    def prefill(
        self, length_tokens: ArrayLike, *, tp: ArrayLike, dp: ArrayLike, hit_rate: ArrayLike = 0.0
    ) -> PrefillTime:
        """Time to prefill one prompt per data-parallel group; arguments broadcast.

        Parameters
        ----------
        length_tokens
            S, the length of the prompt.
        tp, dp
            GPUs of a group and number of groups; the experts are spread over tp * dp GPUs.
        hit_rate
            Share of the prompt found in a prefix cache.
        """
        s, r = np.asarray(length_tokens, np.float64), np.asarray(hit_rate, np.float64)
        _require(bool(np.all((s >= 0) & (r >= 0) & (r <= 1))), "lengths >= 0 and hits of 0 to 1")
        if self.quirks.hits_recomputed:
            return self.prefill_step(s, s * s / 2.0, tp=tp, dp=dp, fresh=1.0 - r)
        n = (1.0 - r) * s
        return self.prefill_step(n, n * (r * s + n / 2.0), tp=tp, dp=dp)

    def prefill_step(
        self,
        tokens: ArrayLike,
        pairs: ArrayLike,
        *,
        tp: ArrayLike,
        dp: ArrayLike,
        fresh: ArrayLike = 1.0,
    ) -> PrefillTime:
        """Time to prefill ``tokens`` that attend ``pairs`` of tokens under a causal mask.

        ``fresh`` is the share of tokens whose keys and values are projected.
        """
        n, p, t, g, f = np.broadcast_arrays(
            *(np.asarray(a, np.float64) for a in (tokens, pairs, tp, dp, fresh))
        )
        _require(bool(np.all((t >= 1) & (g >= 1))), "tp and dp of 1 or more")
        m, d, quirks = self.llm, self.device, self.quirks
        query, down, up, output = self._projections
        width = m.qk_rope_head_dim + m.qk_nope_head_dim + m.v_head_dim
        per_pair = m.heads * (width if m.latent else 2 * m.head_dim)
        core = 2e-9 * ((2.0 if quirks.no_causal_mask else 1.0) * p * per_pair + n * output)
        whole = self._attention(2e-9 * n * (query + f * down + up), core, prefill=True)
        split = self._split(whole, n, t)
        dense = self._dense(n, t, prefill=True)
        rate = d.tflops("fp4", prefill=True)
        load = self._move_ms(float(m.expert_params), d.memory_gbs)
        one = 2e-9 * (n / t) * m.expert_params / rate
        shared = m.shared_experts * (one + load)
        routed = m.experts_active * one + load * m.experts / (t * g)
        if m.experts:
            dispatch, combine = self._prefill_exchange(n, t, g)
        else:
            dispatch = combine = np.zeros_like(n)
        first = (whole if quirks.dense_undivided else split) + dense
        compute = m.dense_layers * first + m.moe_layers * (split + shared + routed)
        hidden = np.maximum(0.0, combine - split - shared) + np.maximum(0.0, dispatch - routed)
        return PrefillTime(
            dense_attention_ms=whole if quirks.dense_undivided else split,
            dense_mlp_ms=dense,
            attention_ms=split,
            shared_ms=shared,
            routed_ms=routed,
            dispatch_ms=dispatch,
            combine_ms=combine,
            compute_ms=compute,
            communication_ms=m.moe_layers * (dispatch + combine),
            total_ms=compute + m.moe_layers * hidden,
        )

    # Decode ---------------------------------------------------------------------------------

    def decode(
        self,
        length_tokens: ArrayLike,
        batch: ArrayLike,
        *,
        tp: ArrayLike,
        gpus: ArrayLike,
        output_tokens: ArrayLike,
        fp8_combine: bool = True,
        micro_batches: int = 2,
    ) -> DecodeTime:
        """Time of one decode step; arguments broadcast.

        Parameters
        ----------
        length_tokens
            S, cached tokens of each request.
        batch
            Requests per GPU.
        tp, gpus
            GPUs that share attention, and GPUs that the experts are spread over.
        output_tokens
            Output that the memory must hold beside S.
        fp8_combine
            Whether GPUs with fp4 units return one byte per value instead of two.
        """
        s, b, t, e, out = np.broadcast_arrays(
            *(np.asarray(a, np.float64) for a in (length_tokens, batch, tp, gpus, output_tokens))
        )
        _require(bool(np.all((s >= 0) & (b > 0) & (t >= 1) & (e >= 1))), "batch, tp, gpus above 0")
        most = self.max_batch(s, tp=t, gpus=e, output_tokens=out)
        if self.quirks.large_batch_dropped:
            fits = b <= most
        else:
            b = np.minimum(b, np.floor(most))
            fits = b >= 1
        b = np.where(fits, b, np.nan)
        parts = self.decode_step(
            s, np.where(fits, b, 1.0), t, e, fp8_combine=fp8_combine, micro_batches=micro_batches
        )
        shown = {name: np.where(fits, value, np.nan) for name, value in parts.items()}
        return DecodeTime(batch=b, max_batch=most, fits=fits, **shown)

    def decode_step(
        self,
        length_tokens: Floats,
        batch: Floats,
        tp: Floats,
        gpus: Floats,
        *,
        fp8_combine: bool = True,
        micro_batches: int = 2,
    ) -> dict[str, Floats]:
        """The times of :class:`DecodeTime`, whether or not the batch fits."""
        m, d, quirks = self.llm, self.device, self.quirks
        s, b, t, e = length_tokens, batch, tp, gpus
        group = b if quirks.group_batch_mixed else b * t
        projections, output, per_pair = self._absorbed
        core = 2e-9 * group * (s * per_pair + output)
        cached = s * m.kv_values_per_token_layer() * group / self._shards(t)
        whole = self._attention(2e-9 * group * projections, core, prefill=False)
        read = self._cache_ms(cached)
        split = self._split(whole, group, t) + read
        first = whole + read if quirks.dense_undivided else split
        dense = self._dense(b, t, prefill=False)
        zero = np.zeros_like(split)
        shared = routed = dispatch = combine = zero
        if m.experts:
            small = b / micro_batches
            held = self.experts_per_gpu(e)
            rate = d.tflops("fp4", prefill=False) * self.efficiency(small * m.experts_active / held)
            load = self._move_ms(float(m.expert_params), d.memory_gbs) * (0.5 if d.fp4 else 1.0)
            one = 2e-9 * small * m.expert_params / rate
            shared = micro_batches * m.shared_experts * (one + load) + zero
            routed = micro_batches * (m.experts_active * one + load * held) + zero
            dispatch, combine = self._decode_exchange(b, e, fp8_combine, micro_batches)
        delta = dispatch + combine - split - shared
        compute = m.dense_layers * (first + dense) + m.moe_layers * (split + shared + routed)
        return {
            "dense_attention_ms": first,
            "dense_mlp_ms": dense,
            "attention_ms": split,
            "shared_ms": shared,
            "routed_ms": routed,
            "dispatch_ms": dispatch,
            "combine_ms": combine,
            "delta_ms": delta,
            "compute_ms": compute,
            "tpot_ms": compute + m.moe_layers * np.maximum(0.0, delta),
        }

    def request_ms(
        self,
        length_tokens: ArrayLike,
        batch: ArrayLike,
        *,
        tp: ArrayLike,
        gpus: ArrayLike,
        output_tokens: ArrayLike,
        max_output_tokens: ArrayLike | None = None,
    ) -> Floats:
        r"""Time of the whole decode of a request, :math:`\sum_{i=1}^{N} TPOT(S + i)` [ms].

        Source: Rignall, section 4.2.3: time of the whole decode of a request; t_decode.
        The step is linear in the length but for what communication does not hide, so the sum is
        taken in closed form. ``output_tokens`` is N, ``max_output_tokens`` what the memory must
        hold (N by default); NaN where it cannot.
        """
        s, b, t, e, n = np.broadcast_arrays(
            *(np.asarray(a, np.float64) for a in (length_tokens, batch, tp, gpus, output_tokens))
        )
        most = n if max_output_tokens is None else np.asarray(max_output_tokens, np.float64)
        first = self.decode(s + 1.0, b, tp=t, gpus=e, output_tokens=most - 1.0)
        fits = first.fits
        last = self.decode_step(s + n, np.where(fits, first.batch, 1.0), t, e)
        steps = n * (first.compute_ms + last["compute_ms"]) / 2.0
        start, fall = first.delta_ms, first.delta_ms - last["delta_ms"]
        fall = fall / np.maximum(n - 1.0, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.where(fall > 0, np.floor(start / fall) + 1.0, n)
        shown = np.where(start > 0, np.clip(shown, 0.0, n), 0.0)
        extra = shown * start - fall * shown * (shown - 1.0) / 2.0
        return np.asarray(np.where(fits, steps + self.llm.moe_layers * extra, np.nan))

    def table(self) -> Table:
        """Parts of a few typical steps, per layer with experts, and the whole [ms]."""
        rows: list[tuple[str, str, PrefillTime | DecodeTime, Floats]] = []
        for length, tp, dp in ((512, 1, 32), (4096, 1, 32), (4096, 8, 4)):
            p = self.prefill(length, tp=tp, dp=dp)
            rows.append((f"prefill of {length:,}", f"tp{tp} dp{dp}", p, p.total_ms))
        for batch, tp in ((16, 1), (128, 1), (128, 8)):
            d = self.decode(4096, batch, tp=tp, gpus=32, output_tokens=512)
            rows.append((f"decode, {batch} x 4,096", f"tp{tp}, 32 GPUs", d, d.tpot_ms))
        names = ("attention", "shared", "routed", "dispatch", "combine")
        columns = (
            Column("step"),
            Column("parallelism"),
            *(Column(name, "ms", 3) for name in names),
            Column("whole step", "ms"),
        )
        cells = tuple(
            (label, how, *(float(getattr(x, f"{n}_ms")) for n in names), float(total))
            for label, how, x, total in rows
        )
        kept = self.quirks.kept
        note = f"Quirks kept: {kept}." if kept else "All quirks mended."
        return Table(f"{self.llm.name} on {self.device.name}", columns, cells, (note,))


def _require(good: bool, rule: str) -> None:
    what = "The mixture-of-experts model was asked for a step that does not exist."
    require(good, what, resolve=f"give {rule}.")
