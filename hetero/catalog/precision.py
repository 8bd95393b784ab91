"""Data types of weights and KV cache, formats of checkpoints, and the bytes they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from hetero import paths
from hetero.errors import ParameterError

if TYPE_CHECKING:
    from hetero.catalog.models import LayerParams

#: Bits of one value.
PRECISION_BITS = MappingProxyType(
    {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp4": 4}
)


def bytes_of(values: int, precision: str) -> int:
    """Bytes that ``values`` numbers take in a precision, rounded up to a whole byte.

    Examples
    --------
    >>> bytes_of(1000, "int4")
    500
    """
    bits = PRECISION_BITS.get(precision)
    if bits is None:
        raise ParameterError(
            f"No precision is called '{precision}'.",
            resolve=f"use one of {', '.join(PRECISION_BITS)}.",
        )
    return -(-values * bits // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a checkpoint holds its weights, scales and zero points included.

    Attributes
    ----------
    precision
        Data type that it is loaded as, of :data:`PRECISION_BITS`.
    attention, dense, experts, shared, rest
        Bits of a weight by where it is, see :class:`hetero.catalog.models.LayerParams`; at the mean
        where some modules stay in 16 bits. ``rest`` has embedding, head, norms and routers too.
    hidden_multiple, width_multiple
        Sizes to whose multiples engines pad the matrices of routed experts.

    Examples
    --------
    >>> weight_format("awq").dense, weight_format("mxfp4").experts
    (4.15625, 4.25)
    """

    name: str
    precision: str
    attention: float
    dense: float
    experts: float
    shared: float
    rest: float = 16.0
    hidden_multiple: int = 1
    width_multiple: int = 1

    def bytes(self, params: LayerParams) -> int:
        """Bytes of so many parameters, rounded up."""
        bits = (self.attention, self.dense, self.experts, self.shared, self.rest)
        return math.ceil(sum(n * b for n, b in zip(params, bits, strict=True)) / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FormatRow:
    """One row of formats.csv."""

    name: str
    precision: str
    bits: float
    expert_bits: float
    rest_bits: float
    hidden_multiple: int
    width_multiple: int
    source: str
    aliases: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def weight_formats() -> dict[str, WeightFormat]:
    """Formats of ``data/specs/formats.csv`` by name, and by the data types that they stand for."""
    from hetero.rows import read_records

    found: dict[str, WeightFormat] = {}
    for row in read_records(paths.data("specs", "formats.csv"), _FormatRow):
        one = _FormatRow(**row)  # type: ignore[arg-type]
        made = WeightFormat(
            name=one.name,
            precision=one.precision,
            attention=one.bits,
            dense=one.bits,
            experts=one.expert_bits,
            shared=one.bits,
            rest=one.rest_bits,
            hidden_multiple=one.hidden_multiple,
            width_multiple=one.width_multiple,
        )
        found |= dict.fromkeys((one.name, *one.aliases), made)
    return found


def weight_format(name: str) -> WeightFormat:
    """Format of that name, or the usual one of a data type."""
    found = weight_formats().get(name)
    if found is None:
        names = dict.fromkeys([*PRECISION_BITS, *(one.name for one in weight_formats().values())])
        raise ParameterError(
            f"No precision is called '{name}'.", resolve=f"use one of {', '.join(names)}."
        )
    return found
