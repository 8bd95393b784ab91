"""JupyterLab over a copy of the notebooks, in the Chromium of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero import paths
from tests.ui import driven_lab

SHOTS = paths.root() / "pipelines" / "build" / "ui"
"""Screenshots of the last run, for people to look at; git ignores the folder."""


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser; without one, or what drives it, these tests are skipped."""
    pytest.importorskip("playwright", reason="the dev extra is not installed")
    found = driven_lab.browser()
    if found is None:
        pytest.skip(
            "no Chromium on this machine: apt-get install chromium, or playwright install chromium"
        )
    return found


@pytest.fixture(scope="session")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the notebooks that a page may save over."""
    copy = tmp_path_factory.mktemp("lab") / "notebooks"
    kept = shutil.ignore_patterns(".ipynb_checkpoints")
    shutil.copytree(paths.root() / "notebooks", copy, ignore=kept)
    return copy


@pytest.fixture(scope="session")
def lab(
    chromium: str, notebooks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[driven_lab.Lab]:
    """A running JupyterLab, one for all tests."""
    for name in ("jupyterlab", "ipywidgets"):
        pytest.importorskip(name, reason="the lab extra is not installed")
    home = tmp_path_factory.mktemp("home")
    with driven_lab.lab(notebooks, home, chromium, SHOTS) as found:
        yield found
