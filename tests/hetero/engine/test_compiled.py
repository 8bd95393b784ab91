"""Kernels: what is read from the cache, and when it no longer is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import types

from hetero.deployment import Deployment, Replica
from hetero.engine import compiled, failure
from hetero.latency.step import StepModel
from hetero.routers import Predictive
from hetero.simulator import loop, simulate, warm
from hetero.workload import Trace

TEXT = """
from hetero.engine.compiled import compiled

@compiled
def twice(x):
    return 2 * x
"""


@pytest.fixture
def load(tmp_path):
    """Load the same module anew, as another process would."""
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(TEXT)

    def anew():
        compiled._fingerprint.cache_clear()
        compiled._text_and_imports.cache_clear()
        spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        assert module.twice(21) == 42
        return module.twice.stats

    yield anew
    sys.modules.pop("kernels_of_a_test", None)


def test_a_change_in_what_a_kernel_imports_empties_its_cache(load, monkeypatch, tmp_path) -> None:
    # hetero as it would lie elsewhere: a module of constants, and one that the kernel imports.
    package = tmp_path / "hetero" / "engine"
    package.mkdir(parents=True)
    (package / "compiled.py").write_text("from hetero.engine import constants\n")
    constants, other = package / "constants.py", package / "other.py"
    constants.write_text("TWO = 2\n")
    other.write_text("THREE = 3\n")
    monkeypatch.setattr(compiled, "_ROOT", tmp_path)
    assert sum(load().cache_misses.values()) == 1
    assert sum(load().cache_hits.values()) == 1
    other.write_text("THREE = 4\n")  # nothing that the kernel could call
    assert sum(load().cache_hits.values()) == 1
    constants.write_text("TWO = 1 + 1\n")
    assert sum(load().cache_misses.values()) == 1
    assert sum(load().cache_hits.values()) == 1


def test_the_fingerprint_of_a_kernel_covers_the_constants_it_freezes() -> None:
    engine = Path(compiled.__file__).parent
    seen, left = set(), [engine.parent / "simulator" / "loop.py"]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += compiled._text_and_imports(one)[1]
    assert {engine / "state.py", engine / "replica.py", engine / "batch.py"} <= seen
    assert not [one for one in seen if "apps" in one.parts]


def test_where_no_cache_can_be_kept_kernels_still_run() -> None:
    space = {"compiled": compiled.compiled}
    exec("@compiled\ndef half(x):\n    return x / 2\n", space)  # no file, so no place beside it
    assert space["half"](3.0) == 1.5


def test_what_kernels_call_is_linked_in_one_form_and_counted_while_it_is_compiled(
    monkeypatch, capsys
) -> None:
    monkeypatch.setattr("hetero.progress.EVERY_S", 0.0)
    space = {"compiled": compiled.compiled, "__name__": "hetero.kernels_of_a_test"}
    text = "@compiled\ndef half(x):\n    return x / 2\n\n\n"
    text += "@compiled\ndef both(x, y):\n    return half(x) + half(y) + half(1)\n"
    exec(text, space)
    assert space["both"](np.int32(3), 4) == 4.0
    assert [list(space["half"].linked.overloads), space["half"].nopython_signatures] == [
        [(types.int64,)],
        [],
    ]
    said = capsys.readouterr().err.splitlines()
    start = "compiling the simulator, once for this machine"
    assert [line.rpartition(",")[0] for line in said] == [
        f"{start}: {k} of 2 kernels" for k in (1, 2)
    ]
    assert space["both"](np.int32(5), 4) == 5.0
    assert capsys.readouterr().err == ""
    assert space["half"](3.0) == 1.5


def test_what_set_up_compiles_is_all_that_other_runs_call() -> None:
    step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    one = Deployment("one", (Replica("a", step, kv_tokens=9_000),))
    trace = Trace([0, 0, 1], [5, 6, 7], [1, 2, 3], priorities=[0, 1, 0]).closed_loop(2)
    for part in (["built-in"], ["others"]):
        warm.main(part)
    kernels = (loop.drive, loop.missed_for_certain, loop.look, loop.send_from, failure.fail)
    assert [len(kernel.overloads) for kernel in kernels] == [1] * len(kernels)
    assert simulate(one, trace, Predictive(), sample_s=1).counts["finished"] == 3
    assert [len(kernel.overloads) for kernel in kernels] == [1] * len(kernels)
