"""The process that serves: small, and its interpreted kernels decide as the compiled ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.engine.compiled import interpret, interpreted
from tests.hetero.apps.serving.serving_decisions import lives
from tests.serving import ROOT, Served


def test_interpreted_kernels_decide_bit_for_bit_as_compiled_ones():
    program = [sys.executable, "-m", "tests.hetero.apps.serving.serving_decisions"]
    plain = json.loads(subprocess.run(program, cwd=ROOT, check=True, capture_output=True).stdout)
    compiled = lives()
    assert plain.keys() == compiled.keys()
    for name, seen in compiled.items():
        assert plain[name] == seen, name
    decided = {choice for seen in compiled.values() for choice, _ in seen}
    assert decided >= {None, -2, 0, 1, 2, 3}  # nowhere, later, and each engine


def test_a_process_that_has_compiled_kernels_goes_on_with_them():
    interpret()
    assert not interpreted()


_SERVE = """
import sys
from hetero.apps.cli import main
try:
    main(["serve", sys.argv[1], "--check"])
except SystemExit as done:
    assert not done.code
import hetero.apps.serving.app
print(*sys.modules, sep="\\n")
"""


def test_what_serves_imports_nothing_of_planning_frames_or_pictures(tmp_path):
    served = Served(tmp_path, {"a": "http://127.0.0.1:1"}, router="hetero")
    program = [sys.executable, "-c", _SERVE, str(served.file)]
    done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = set(done.stdout.splitlines())
    assert "hetero.apps.serving.dispatcher" in loaded
    heavy = {"numba", "llvmlite", "pandas", "pyarrow", "scipy", "matplotlib", "ortools", "joblib"}
    assert not loaded & (heavy | {"hetero.simulator", "hetero.plots", "hetero.programs"})
