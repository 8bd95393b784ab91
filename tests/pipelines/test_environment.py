"""Stages, sweeps and tests take the same kernels, whatever the processor."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pytest

from hetero import paths
from hetero.errors import ParameterError
from pipelines import environment, run
from pipelines.sweep import point, workers
from tests.pipelines.conftest import cell, write_notebook

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names the kernels of x86-64")

SHOWS = """\
import json
from pathlib import Path

found = Path("/proc/self/environ").read_text().rstrip("\\0").split("\\0")
Path(output).write_text(json.dumps(dict(line.split("=", 1) for line in found)))
"""

KERNELS = """\
import json
import numpy
import scipy.linalg
import threadpoolctl
import torch

blas = [one for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
print(json.dumps({
    "cores": sorted({one["architecture"] for one in blas if one["internal_api"] == "openblas"}),
    "threads": sorted({one["num_threads"] for one in blas}),
    "numpy": numpy.show_config(mode="dicts")["SIMD Extensions"].get("found", []),
    "torch": torch.backends.cpu.get_cpu_capability(),
}))
"""

# What results rest on: draws, products, factorisations, a kernel.
DIGITS = """\
import hashlib
import numpy as np
from scipy.special import erfcx, ndtr
from hetero.engine.compiled import compiled

@compiled
def weighted(values, by):
    total = 0.0
    for k in range(len(values)):
        total += values[k] * by + values[k] ** 0.3
    return total

random = np.random.default_rng(0)
draws = random.gamma(2.3, size=999)
a = random.random((80, 6))
parts = [draws, np.exp(draws), np.log(draws), draws**0.3, ndtr(draws), erfcx(draws), a.T @ a]
parts += [np.linalg.lstsq(a, draws[:80])[0], np.linalg.svd(a)[1], np.array(weighted(draws, 0.1))]
print(hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest())
"""


def at_start() -> dict[str, str]:
    """The environment that this process was started in."""
    lines = Path("/proc/self/environ").read_text().rstrip("\0").split("\0")
    return dict(line.split("=", 1) for line in lines)


def pinned(code: str, **more: str) -> str:
    """What Python code prints in the environment, started from another one."""
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.environment", sys.executable, "-c", code],
        cwd=paths.root(),
        env=os.environ | {"PYTHONPATH": str(paths.root())} | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@needs_proc
def test_tests_run_in_it_from_their_start():
    assert environment.processor().items() <= at_start().items()


@needs_proc
def test_it_arrives_in_the_kernel_of_a_stage_whatever_the_user_has_set(tmp_path, monkeypatch):
    for name in environment.PINNED:
        monkeypatch.setenv(name, "of the user")
    notebook, shown = tmp_path / "shows.ipynb", tmp_path / "shown.json"
    parameters = cell("code", 'output: str = ""\n', tags=["parameters"])
    write_notebook(notebook, parameters, cell("code", SHOWS))
    run.execute(notebook, {"output": str(shown)}, failed=tmp_path / "failed.ipynb")
    found = json.loads(shown.read_text())
    assert environment.stage().items() <= found.items()
    assert os.environ["MKL_CBWR"] == "of the user"


@needs_proc
def test_it_arrives_in_the_workers_of_a_sweep(monkeypatch):
    for name in environment.PINNED:
        monkeypatch.delenv(name)
    with workers._backend("loky", 2) as options, joblib.parallel_config(**options):
        (found,) = joblib.Parallel()([joblib.delayed(at_start)()])
    assert environment.stage().items() <= found.items()
    assert "MKL_CBWR" not in os.environ


def test_points_take_it_on_before_they_import_anything():
    code = "import os\nfrom pipelines.sweep import point\npoint._prepare()\nprint(dict(os.environ))"
    code += "\nimport numpy, threadpoolctl\n"
    code += "print({one['num_threads'] for one in threadpoolctl.threadpool_info()})"
    plain = {k: v for k, v in os.environ.items() if k not in environment.processor()}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=paths.root(),
        env=plain | {"PYTHONPATH": str(paths.root())},
        capture_output=True,
        text=True,
        check=True,
    )
    shown, kernels = done.stdout.splitlines()
    for name, value in environment.stage().items():
        assert f"'{name}': '{value}'" in shown
    assert kernels == "{1}"
    assert point.__doc__


@x86
def test_libraries_do_take_these_kernels():
    found = json.loads(pinned(KERNELS))
    assert found == {"cores": ["Nehalem"], "threads": [1], "numpy": [], "torch": "DEFAULT"}


@x86
def test_all_that_numpy_dispatches_is_named():
    extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    known = {*extensions.get("found", []), *extensions.get("not found", [])}
    assert set(environment.PINNED["NPY_DISABLE_CPU_FEATURES"].split()) == known


@x86
def test_two_settings_of_what_remains_free_leave_the_same_digits():
    # The choices of another processor, which are replaced, and all that is free turned round.
    other = {
        "OPENBLAS_CORETYPE": "Sandybridge",
        "ATEN_CPU_CAPABILITY": "avx2",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F",
        environment.OTHER: "other",
    }
    assert pinned(DIGITS) == pinned(DIGITS, **other)


def test_what_is_free_is_turned_round_and_nothing_else(monkeypatch):
    plain = environment.processor()
    monkeypatch.setenv(environment.OTHER, "other")
    turned = environment.processor()
    changed = {name for name in turned if plain.get(name) != turned[name]}
    assert changed == set(environment._FREE)
    assert turned["GLIBC_TUNABLES"].startswith(plain["GLIBC_TUNABLES"])
    assert environment.PINNED.keys() & changed == {"GLIBC_TUNABLES"}
    monkeypatch.setenv(environment.OTHER, "intel")
    with pytest.raises(ParameterError, match="HETERO_PROCESSOR is 'intel'"):
        environment.processor()


@pytest.mark.parametrize(
    ("command", "says"), [([], "No command is given"), (["no-such-program"], "cannot be run")]
)
def test_what_cannot_be_started_is_said_in_a_sentence(command, says):
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.environment", *command],
        cwd=paths.root(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
