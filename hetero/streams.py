"""Named streams of random numbers: one seed, independent draws for each purpose."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """Generator for one purpose of a run; the same seed and name give the same numbers.

    Adding a purpose never shifts the draws of the others.

    Examples
    --------
    >>> int(stream(0, "router").integers(100)) == int(stream(0, "router").integers(100))
    True
    >>> float(stream(0, "router").random()) == float(stream(0, "arrivals").random())
    False
    """
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
