from __future__ import annotations

import doctest

from quick_cards import little

from hetero import paths
from pipelines.docs import believed


def test_every_example_of_the_readme_gives_what_it_says(monkeypatch):
    little(monkeypatch)
    found = doctest.testfile(str(paths.root() / "README.md"), module_relative=False)
    assert found.attempted > 5
    assert found.failed == 0


def test_the_readme_says_what_the_measurements_say():
    text = (paths.root() / "README.md").read_text(encoding="utf-8")
    assert believed.markdown() in text, "python -m pipelines.docs.believed writes it"
    assert len(text.splitlines()) <= 150
