"""The records of :mod:`hetero.engine.state` as objects of Python.

Kernels that are not compiled read attributes of these, at a tenth of what an element of an array
costs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from functools import cache, partial
from typing import Any

import numpy as np


def objects(records: Any) -> list[Any]:
    """One object per record, with its fields as attributes.

    Examples
    --------
    >>> one = objects(np.array([(1, 2.5)], [("count", "i8"), ("load", "f8")]))[0]
    >>> one.count, one.load
    (1, 2.5)
    """
    return [make() for make in makers(records)]


def makers(records: Any) -> list[Callable[[], Any]]:
    """Functions that make such an object, one per record."""
    kind: Callable[..., Any] = _kind(records.dtype)
    # What a record holds several of comes as an array, of which each element would be costly too.
    rows = [
        [x.tolist() if isinstance(x, np.ndarray) else x for x in row] for row in records.tolist()
    ]
    return [partial(kind, *row) for row in rows]


@cache
def _kind(fields: np.dtype[np.void]) -> type[Any]:
    return make_dataclass("Row", fields.names or (), slots=True, eq=False)
