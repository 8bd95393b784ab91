"""The records of :mod:`hetero.engine.state` as objects of Python.

Kernels that are not compiled read attributes of these, at a tenth of what an element of an array
costs them.
"""

from __future__ import annotations

from dataclasses import make_dataclass
from functools import cache
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
    kind = _kind(records.dtype)
    return [kind(*row) for row in records.tolist()]


@cache
def _kind(fields: np.dtype[np.void]) -> type[Any]:
    return make_dataclass("Row", fields.names or (), slots=True, eq=False)
