"""Step models of the groups of an island, as the simulator plays them, with their error."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.errors import ParameterError
from hetero.latency.accuracy import Accuracy
from hetero.latency.models.moe import MoeModel
from hetero.latency.reduction import Reduction
from hetero.latency.step import Piece, StepModel

# Lengths and loads at which the error of a reduction is taken.
_LENGTHS = np.array([16, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536], np.float64)
_MICRO_BATCHES = 2  # as in MoeModel.decode


def prefill_group(model: MoeModel, *, tp: int, dp: int) -> Reduction:
    r"""Step model of one of the ``dp`` groups of ``tp`` GPUs that prefill prompt by prompt.

    The prefill is linear in tokens and in pairs of tokens but for two bends: dispatch hides
    behind routed experts up to a number of tokens, which is a knot; combine hides behind
    attention and shared experts where it can, which is the second piece. So nothing is lost for a
    prompt that is prefilled alone; several at once count as one of their joint tokens and pairs.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.latency.models.moe_devices import moe_device
    >>> model = MoeModel(llm("DeepSeek-V3"), moe_device("H200"))
    >>> round(1e3 * float(prefill_group(model, tp=4, dp=8).model.prefill_seconds([4383])), 2)
    163.81
    """

    def pieces_s(tokens: ArrayLike, pairs: ArrayLike) -> tuple[Floats, Floats]:
        t = model.prefill_step(tokens, pairs, tp=tp, dp=dp)
        hidden = t.compute_ms + model.llm.moe_layers * np.maximum(0.0, t.dispatch_ms - t.routed_ms)
        shown = t.combine_ms - t.attention_ms - t.shared_ms
        return 1e-3 * hidden, 1e-3 * (hidden + model.llm.moe_layers * shown)

    far = model.prefill_step(np.array([0.0, 1e6]), 0.0, tp=tp, dp=dp)
    start, end = far.dispatch_ms - far.routed_ms
    knots = [0.0, 1e6]
    if start * end < 0:
        knots.insert(1, float(1e6 * start / (start - end)))
    at = np.array(knots)
    base, rates = pieces_s(at, 0.0), pieces_s(0.0, np.array([0.0, 1e6]))
    step = StepModel(
        tuple(
            Piece(at, level, np.zeros(1), max(0.0, float(rate[1] - rate[0])) / 1e6)
            for level, rate in zip(base, rates, strict=True)
        ),
        source=f"{_name(model)}, prefill on tp{tp} dp{dp}",
        provenance="derived",
    )
    pairs = _LENGTHS**2 / 2.0
    exact = 1e-3 * model.prefill_step(_LENGTHS, pairs, tp=tp, dp=dp).total_ms
    accuracy = Accuracy.of(step.seconds(_LENGTHS, 0, 0.0, pairs), exact)
    return Reduction(step, {"prefill": accuracy}, "Prompts are prefilled one by one.")


def decode_group(
    model: MoeModel, *, tp: int, gpus: int, copies: int, max_batch: int = 1024
) -> Reduction:
    r"""Step model of an expert group of ``gpus`` GPUs that decodes ``copies`` batches in step.

    n requests are a batch of n / copies per GPU or group. A step is linear in it between the
    jumps of the efficiency of small products, which are knots, and in the cached tokens; what
    communication does not hide is the second piece. So nothing is lost at whole n.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.latency.models.moe_devices import moe_device
    >>> model = MoeModel(llm("DeepSeek-V3"), moe_device("RubinU-NVL576"))
    >>> step = decode_group(model, tp=4, gpus=320, copies=320).model
    >>> round(1e3 * float(step.seconds(256 * 320, 256 * 320, 256 * 320 * 4383)), 3)
    12.747
    """
    if copies < 1 or max_batch < 1:
        raise ParameterError(
            f"{copies} batches of {max_batch} requests cannot be decoded.",
            resolve="give 1 or more of both.",
        )

    def pieces_s(requests: Floats, length: float) -> tuple[Floats, Floats]:
        b = requests / copies
        s, t, e = (np.full_like(b, x) for x in (length, tp, gpus))
        parts = model.decode_step(s, b, t, e, micro_batches=_MICRO_BATCHES)
        late = model.llm.moe_layers * parts["delta_ms"]
        return 1e-3 * parts["compute_ms"], 1e-3 * (parts["compute_ms"] + late)

    most = max_batch * copies
    knots = {1.0, float(most)}
    if model.llm.experts:
        # The efficiency jumps where a micro-batch brings 1, 2, 4, ... tokens to an expert.
        tokens, held = 2.0 ** np.arange(17), float(model.experts_per_gpu(gpus))
        jumps = copies * tokens * held * _MICRO_BATCHES / model.llm.experts_active
        for jump in np.ceil(jumps - 1e-9).tolist():
            knots |= {n for n in (jump - 1.0, jump) if 1.0 < n < most}
    at = np.array(sorted(knots))
    base, loaded = pieces_s(at, 0.0), pieces_s(at, 1e4)
    pieces = tuple(
        # The time per cached token is the same at every load: take it at the largest.
        Piece(at, level, np.array([max(0.0, more[-1] - level[-1]) / (1e4 * at[-1])]))
        for level, more in zip(base, loaded, strict=True)
    )
    step = StepModel(
        pieces,
        source=f"{_name(model)}, decode on {gpus} GPUs, tp{tp}",
        provenance="derived",
        max_decoding=float(most),
    )
    requests, lengths = np.meshgrid(
        np.unique(np.geomspace(1, most, 60).round()), _LENGTHS, indexing="ij"
    )
    exact = np.stack(
        [np.maximum(*pieces_s(requests[:, k], lengths[0, k])) for k in range(len(_LENGTHS))], 1
    )
    accuracy = Accuracy.of(step.seconds(requests, requests, requests * lengths), exact)
    note = f"{copies} batches advance together; a request waits for none."
    return Reduction(step, {"decode": accuracy}, note)


def _name(model: MoeModel) -> str:
    return f"{model.llm.name} on {model.device.name}"
