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
    """How a checkpoint holds its weights; a row of ``formats.csv``, or what one states.

    Attributes
    ----------
    precision
        Data type that it is loaded as, of :data:`PRECISION_BITS`.
    attention, dense, experts, shared, rest
        Bits of a weight, scales and zero points included, by where it is
        (:class:`hetero.catalog.models.LayerParams`); means where some modules stay in 16 bits.
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
    rest: float
    hidden_multiple: int = 1
    width_multiple: int = 1
    aliases: tuple[str, ...] = ()
    source: str = ""

    def bytes(self, params: LayerParams) -> int:
        """Bytes of so many parameters, rounded up."""
        bits = (self.attention, self.dense, self.experts, self.shared, self.rest)
        return math.ceil(sum(n * b for n, b in zip(params, bits, strict=True)) / 8)


@lru_cache(maxsize=1)
def weight_formats() -> dict[str, WeightFormat]:
    """Formats of ``data/specs/formats.csv`` by name, and by the data types that they stand for."""
    from hetero.rows import read_records

    rows = read_records(paths.data("specs", "formats.csv"), WeightFormat)
    found = [WeightFormat(**row) for row in rows]  # type: ignore[arg-type]
    return {name: one for one in found for name in (one.name, *one.aliases)}


def weight_format(name: str) -> WeightFormat:
    """Format of that name, or the usual one of a data type."""
    found = weight_formats().get(name)
    if found is None:
        names = dict.fromkeys([*PRECISION_BITS, *(one.name for one in weight_formats().values())])
        raise ParameterError(
            f"No precision is called '{name}'.", resolve=f"use one of {', '.join(names)}."
        )
    return found
