"""What the tests of `hetero serve` need."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from pipelines.bench.engines import Running, engine, write_model


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    """What these tests ask with and what they ask; imported as they run, not to collect them."""
    for name in ("openai", "starlette", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name}, of the extras serving and dev, is not installed")


@pytest.fixture(scope="package")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A real engine, which takes seconds to start: one for all files."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, hidden=64, layers=2)
    with engine(folder) as found:
        yield found
