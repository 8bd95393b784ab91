r"""Features of engines that a question states in a few words: drafts, adapters, names of formats.

Low-rank adapters of rank r add :math:`r (d_{in} + d_{out})` parameters to every module of
:math:`d_{in} \times d_{out}` that they are on, in 16 bits (Hu et al. 2021); an engine sets that
aside for each adapter that it serves at once. What a step with adapters takes longer is not
modelled: no source for it covers the GPUs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from hetero import catalog
from hetero.catalog import Llm
from hetero.errors import ParameterError, require
from hetero.latency.speculation import Speculation

T = TypeVar("T", int, float)

_GIB = 2**30
_DRAFTS = "write for instance length=4,acceptance=0.7,draft=0.15."
_ADAPTERS = "write for instance adapters=8,rank=16,on=attention (or all)."


class Feature(NamedTuple):
    """Drafts, what an engine holds for a feature beside its weights [GiB], and a remark."""

    speculation: Speculation | None
    held_gib: float
    note: str


def speculation(text: str, llm: Llm, precision: str = "fp16") -> Feature:
    """Drafts of a text such as ``length=4,acceptance=0.7,draft=0.15``.

    ``draft`` is a model, whose step takes as much of one of the model as it reads weights; a number
    is that share itself; without it one layer of the model and its logits draft, as heads of EAGLE
    and of multi-token prediction do. Weights of a draft are held beside those of the model.

    Examples
    --------
    >>> model = catalog.llm("Llama-3.1-8B")
    >>> found = speculation("length=4,acceptance=0.7", model)
    >>> round(found.speculation.cost, 4), round(found.held_gib, 2)
    (0.0991, 0.41)
    """
    said = _words("speculate", text, ("length", "acceptance", "draft"), _DRAFTS)
    whole, one, what = llm.matmul_params, said.get("draft", ""), "one more layer"
    held = 2.0 * sum(llm.layer_params(llm.layers - 1, 1))
    cost = ((whole - llm.head_params) / llm.layers + llm.head_params) / whole
    if one:
        try:
            held, cost, what = 0.0, float(one), f"{one} of a step"
        except ValueError:
            draft = catalog.find_llm(one)
            held, what = draft.weight_bytes(precision), draft.name
            cost = draft.matmul_params / whole
    length = _number("speculate", said, "length", int, _DRAFTS)
    drafts = Speculation(length, _number("speculate", said, "acceptance", float, _DRAFTS), cost)
    note = (
        f"Speculative decoding is counted by expectation: drafts of {length} tokens by {what}, "
        f"{drafts.tokens:.3g} tokens a step; an answer of 200 tokens deviates by "
        f"{100 * drafts.spread * (drafts.tokens / 200) ** 0.5:.2g} % in its time per token. "
        "Exported commands do not turn it on."
    )
    return Feature(drafts, held / _GIB, note)


def adapters(text: str, llm: Llm) -> Feature:
    """Adapters of a text such as ``adapters=8,rank=16,on=attention``; ``on`` may be ``all``.

    Examples
    --------
    >>> found = adapters("adapters=8,rank=16,on=attention", catalog.llm("Llama-3.1-8B"))
    >>> found.held_gib * 2**30 / 8 == 2 * 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    True
    """
    said = _words("lora", text, ("adapters", "rank", "on"), _ADAPTERS)
    count = _number("lora", said, "adapters", int, _ADAPTERS)
    rank = _number("lora", said, "rank", int, _ADAPTERS)
    where = said.get("on", "attention")
    good = count >= 1 and rank >= 1 and where in ("attention", "all")
    require(good, f"'{text}' are no adapters.", resolve=_ADAPTERS)
    size = count * adapter_bytes(llm, rank, everywhere=where == "all")
    return Feature(
        None,
        size / _GIB,
        f"{count} adapters of rank {rank} hold {size / _GIB:.3g} GiB of each engine; that steps "
        "take longer with them is not counted. Exported commands do not load them.",
    )


def adapter_bytes(llm: Llm, rank: int, *, everywhere: bool = False) -> int:
    """Bytes of one adapter in 16 bits, on projections of attention or on every dense product."""
    require(
        not llm.latent and not (everywhere and llm.experts),
        f"Adapters of {llm.name} are on projections that are not modelled.",
        resolve="ask for a dense model, or for adapters on attention.",
    )
    query, keys = llm.heads * llm.head_dim, llm.kv_heads * llm.head_dim
    sizes = 2 * (llm.hidden + query) + 2 * (llm.hidden + keys)
    if everywhere:
        sizes += (3 if llm.gated_mlp else 2) * (llm.hidden + llm.intermediate)
    return 2 * rank * sizes * llm.layers


def _words(what: str, text: str, known: tuple[str, ...], resolve: str) -> dict[str, str]:
    said = {}
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        require(
            bool(value) and name in known, f"'{part}' says nothing of --{what}.", resolve=resolve
        )
        said[name] = value
    return said


def _number(
    what: str, said: Mapping[str, str], name: str, kind: Callable[[str], T], resolve: str
) -> T:
    try:
        return kind(said[name])
    except (KeyError, ValueError):
        raise ParameterError(f"--{what} needs a number as its {name}.", resolve=resolve) from None
