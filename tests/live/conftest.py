"""Tests of `hetero serve` that one process and several pass alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Served


@pytest.fixture(scope="module", params=(1, 2), ids=("one process", "two processes"))
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many processes of `hetero serve` listen."""
    Served.workers = request.param
    yield request.param
    Served.workers = 1
