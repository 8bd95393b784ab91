"""What all tests share: where raw data lie, and how examples are drawn.

Raw data are fetched, in HETERO_DATA_MIRROR, or in ../shared/data beside the checkout.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from hetero.workload import datasets

# The same examples in every run, however long a busy machine takes to draw and to try them.
settings.register_profile(
    "hetero",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hetero")
# Nor are they drawn from constants of the modules that a worker happens to have imported.
providers._get_local_constants = lambda: providers._local_constants

# Set while tests are collected, so that skip conditions see it too.
_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
if not os.environ.get(datasets.MIRROR) and _BESIDE.is_dir():
    os.environ[datasets.MIRROR] = str(_BESIDE)


# Here, so that all workers of a run draw from one seed: a change is judged by the same files every
# time, at home and every night there are new ones.
os.environ.setdefault(
    "HETERO_FUZZ_SEED", "0" if "CI" in os.environ else str(secrets.randbelow(2**32))
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line as a user would; gives exit code, stdout and stderr."""
    from hetero.apps.cli import main

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def said(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """What a command that succeeds prints, with nothing on stderr."""

    def out(*words: object) -> str:
        code, found, err = run(*words)
        assert (code, err) == (0, ""), err
        return found

    return out


@pytest.fixture
def told(said: Callable[..., str]) -> Callable[..., Any]:
    """What a command that succeeds tells in JSON."""
    return lambda *words: json.loads(said(*words, "--json"))


@pytest.fixture
def refused(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """What a command that fails says on stderr."""

    def err(*words: object) -> str:
        code, _, found = run(*words)
        assert code == 1, found
        return found

    return err


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command says on stderr does not depend on how long a busy machine takes."""
    monkeypatch.setattr("hetero.progress.EVERY_S", math.inf)


@pytest.fixture(autouse=True)
def _plain_style() -> Iterator[None]:
    """No test sees the style that another one has set for all figures, nor its figures."""
    if "matplotlib" in sys.modules:
        sys.modules["matplotlib"].rcdefaults()
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def pytest_report_header() -> str:
    """The seed of the fuzzer, by which a run can be repeated."""
    return f"HETERO_FUZZ_SEED={os.environ['HETERO_FUZZ_SEED']}"


@pytest.fixture
def need() -> Callable[[str], None]:
    """Skip the test unless the named raw dataset is here."""

    def skip_without(name: str) -> None:
        if not datasets.available(name):
            pytest.skip(
                f"raw data '{name}' is not here: run `hetero data fetch {name}` or set "
                f"{datasets.MIRROR}"
            )

    return skip_without
