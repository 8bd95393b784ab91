"""Kernels: what is read from the cache, and when it no longer is."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from hetero.engine import compiled

TEXT = """
from hetero.engine.compiled import compiled

@compiled
def twice(x):
    return 2 * x
"""


@pytest.fixture
def load(tmp_path):
    """Load the same module anew, as another process would."""
    (tmp_path / "kernels_of_a_test.py").write_text(TEXT)

    def anew():
        spec = importlib.util.spec_from_file_location(
            "kernels_of_a_test", tmp_path / "kernels_of_a_test.py"
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        assert module.twice(21) == 42
        return module.twice.stats

    yield anew
    sys.modules.pop("kernels_of_a_test", None)


def test_a_change_in_any_kernel_empties_the_cache(load, monkeypatch) -> None:
    assert sum(load().cache_misses.values()) == 1
    assert sum(load().cache_hits.values()) == 1
    # The module is the same, but something it might call has changed.
    monkeypatch.setattr(compiled, "_SOURCES", compiled._SOURCES + 1)
    assert sum(load().cache_misses.values()) == 1
    assert sum(load().cache_hits.values()) == 1


def test_the_fingerprint_is_that_of_the_kernels(monkeypatch, tmp_path) -> None:
    for package in ("fleet", "routers", "simulator"):
        (tmp_path / package).mkdir()
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "fleet" / "compiled.py"))
    kernel, other = tmp_path / "routers" / "kernel.py", tmp_path / "simulator" / "run.py"
    kernel.write_text("@compiled\ndef one(): return 1\n")
    other.write_text("two = 2\n")
    first = compiled._fingerprint()
    other.write_text("two = 3\n")
    assert compiled._fingerprint() == first
    kernel.write_text("@compiled\ndef one(): return 2\n")
    assert compiled._fingerprint() != first


def test_where_no_cache_can_be_kept_kernels_still_run() -> None:
    space = {"compiled": compiled.compiled}
    exec("@compiled\ndef half(x):\n    return x / 2\n", space)  # no file, so no place beside it
    assert space["half"](3.0) == 1.5


def test_people_are_told_once_why_the_first_run_takes_long(monkeypatch, capsys) -> None:
    class Dispatcher:
        class py_func:
            __module__ = "hetero.engine.replica"

    class Found:
        data = {"dispatcher": Dispatcher}  # noqa: RUF012

    notice = compiled._Notice()
    notice.on_start(Found)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    notice.on_start(Found)
    notice.on_start(Found)
    assert (
        capsys.readouterr().err == "Compiling the simulator for this machine, once: about 20 s.\n"
    )
