"""Data types of weights and KV cache, and the bytes they take."""

from __future__ import annotations

from types import MappingProxyType

from hetero.errors import ParameterError

#: Bits of one value; scales and zero points of quantised formats are not counted.
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
