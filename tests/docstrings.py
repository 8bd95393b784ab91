"""Runs the examples in docstrings of hetero and pipelines, one test a module; loaded with ``-p``.

pytest's own ``--doctest-modules`` imports every module while it collects, to look for some.
"""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    own = [parent.config.rootpath / name for name in ("hetero", "pipelines")]
    if file_path.suffix != ".py" or not any(map(file_path.is_relative_to, own)):
        return None
    found = ">>> " in file_path.read_text(encoding="utf-8")
    return Module.from_parent(parent, path=file_path) if found else None


class Module(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield Examples.from_parent(self, name="docstrings")


class Examples(pytest.Item):
    def runtest(self) -> None:
        parts = self.path.relative_to(self.config.rootpath).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if name == "hetero.notebook_engine":
            importlib.import_module("papermill")  # which loads it, and has to come first
        module = importlib.import_module(name)
        failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        assert tried, f"no docstring of {name} has an example that is found"
        if failed:
            pytest.fail(f"{failed} of {tried} examples in {name}", pytrace=False)
