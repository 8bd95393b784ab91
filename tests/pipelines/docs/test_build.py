"""The documentation builds without a warning."""

from __future__ import annotations

import pytest

from hetero.errors import HeteroError
from pipelines.docs import build


@pytest.fixture(autouse=True)
def _installed():
    for name in ("sphinx", "furo"):
        pytest.importorskip(name, reason="the docs extra is not installed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_page_and_docstring_is_read_without_a_warning(tmp_path):
    build.build(tmp_path / "site", builder="dummy")
    pages = {path.stem for path in (tmp_path / "site-source" / "api").iterdir()}
    assert {
        "hetero",
        "hetero.memory.budget",
        "hetero.routers.base",
        "hetero.apps.export.service",
    } <= pages


@pytest.mark.filterwarnings("ignore:.*Sphinx")
def test_a_warning_ends_in_an_error(tmp_path, monkeypatch):
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text("# Test\n\n[nowhere](nowhere.md)\n")
    monkeypatch.setattr(build, "PAGES", pages)
    monkeypatch.setattr(build, "generated", dict)
    with pytest.raises(HeteroError, match="have the warnings above"):
        build.build(tmp_path / "site")
    (pages / "index.md").write_text("# Test\n\nA formula is fine.\n")
    folder = build.build(tmp_path / "site")
    assert "A formula is fine" in (folder / "index.html").read_text()
