"""A small project with the real runner, DVC and kernel: one notebook that takes a second."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hetero import paths
from tests.serving import wait_until

#: How long anything is waited for; nothing depends on how much of it is needed [s].
PATIENCE_S = 600.0
Done = subprocess.CompletedProcess[str]

SECTION = '''

from pydantic import Field

SECTIONS.clear()


class Tiny(Section):
    """Parameters of the small notebook."""

    count: int = Field(ge=1, description="points drawn")
    scale: float = Field(gt=0, description="width of the curve [s]")
    kinds: list[Literal["up", "down"]] = Field(min_length=1, description="curves drawn")


SECTIONS["tiny"] = Tiny
'''

PARAMS = """\
# A comment that stays.
profile: default  # smoke | default | paper
workload:
  source: twin  # twin | real

tiny:
  count: 3  # points
  scale: 1.0e-3
  kinds: [up, down]
  smoke:
    count: 2
"""

PIPELINE = """\
stages:
  fingerprints:
    cmd: python -m pipelines.dependencies
    deps: [hetero, notebooks, pipelines/studies, pipelines/report.py, pipelines/run.py]
    outs:
      - pipelines/fingerprints: {cache: false, persist: true}
  tiny:
    foreach: ["${workload.source}"]
    do:
      cmd: python -m pipelines.run tiny --source ${item}
      params: [profile, tiny]
      deps:
        - pipelines/fingerprints/01_tiny
      outs:
        - results/${item}/01_tiny: {cache: false, persist: true}
  report:
    cmd: python -m pipelines.report
    deps:
      - pipelines/fingerprints/report
      - results/${workload.source}
    outs:
      - results/report.html: {cache: false}
      - results/pages: {cache: false}
      - results/claims.csv: {cache: false}
    metrics:
      - results/metrics.json: {cache: false}
plots:
  - results/${workload.source}/01_tiny/line.svg
"""

PARAMETERS_CELL = """\
count: int = 1  # points drawn, where count = 1 is enough
scale: float = 1.0  # width [s]
kinds: list[str] = ["up"]
output: str = ""
profile: str = "interactive"
source: str = "twin"
"""

FIGURE_CELL = """\
import warnings

import pandas as pd
from matplotlib import pyplot as plt

from hetero.plots import figures
from pipelines.studies.results import ResultFolder

figures.use_style()
warnings.warn("a warning names a temporary file", stacklevel=1)
out = ResultFolder("01_tiny", output=output, profile=profile, source=source, seeds=[0])
print("written to", out.folder)
print(object())
figure, axes = plt.subplots()
axes.plot(range(count), [scale * k for k in range(count)], label=kinds[0])
axes.set(xlabel="k", ylabel="scaled")
out.figure(figure, "line", shows=["xiong/Fig. 4"], caption="A line.")
out.table(pd.DataFrame({"x [s]": [scale]}), "points", caption="A point.")
figure
"""


def cell(kind: str, text: str, **metadata: object) -> dict[str, object]:
    """One cell of a notebook file."""
    made: dict[str, object] = {"cell_type": kind, "metadata": metadata, "source": text}
    if kind == "code":
        made |= {"execution_count": None, "outputs": []}
    return made


def write_notebook(path: Path, *cells: dict[str, object]) -> None:
    """Write a notebook with numbered cell ids."""
    body = {
        "cells": [{**one, "id": f"cell-{k}"} for k, one in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")


def tiny_notebook(path: Path, *, prose: str = "Why a line?", last: str = "") -> None:
    """Write the small notebook, with other prose or another last cell."""
    cells = [
        cell("markdown", f"# A line\n\n{prose}"),
        cell("code", PARAMETERS_CELL, tags=["parameters"]),
        cell("markdown", "## Figure"),
        cell("code", FIGURE_CELL),
    ]
    write_notebook(path, *cells, *([cell("code", last)] if last else []))


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below one."""
    return psutil.Process(pid).children(recursive=True)


def ended(family: list[psutil.Process]) -> None:
    """Wait until none of the processes lives."""
    wait_until(lambda: not any(map(lives, family)), PATIENCE_S)


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; a dead one may wait for its parent to ask."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HET"))}
    # As activated: whoever calls DVC by hand has its stages take `python` from the path.
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"}


_WARM: list[subprocess.Popen[str]] = []


def _warm() -> subprocess.Popen[str]:
    """A process that ends with this one, as its input does then, or with the block it is in."""
    if not _WARM or _WARM[-1].poll() is not None:
        program = [sys.executable, "-m", "tests.pipelines.warm"]
        own = {"cwd": paths.root(), "env": _environment() | {"MPLBACKEND": "agg"}}
        _WARM.append(subprocess.Popen(program, stdin=subprocess.PIPE, text=True, **own))
    return _WARM[-1]


@dataclass
class Project:
    """A checkout with one small stage."""

    root: Path

    def begin(self, module: str, *arguments: str, **environment: str) -> Callable[[], Done]:
        """Run a module in this checkout, or the command ``hetero``, in a fork of a warm process.

        What is returned waits for its end.
        """
        folder = Path(tempfile.mkdtemp(dir=self.root.parent, prefix="call-"))
        call = {"module": module, "arguments": arguments, "root": str(self.root),
                "environment": environment, "folder": str(folder)}  # fmt: skip
        print(json.dumps(call), file=_warm().stdin, flush=True)

        def end() -> Done:
            wait_until((folder / "code").is_file)
            code, out, err = ((folder / name).read_text() for name in ("code", "out", "err"))
            return subprocess.CompletedProcess([module, *arguments], int(code), out, err)

        return end

    def call(self, module: str, *arguments: str) -> Done:
        """Run a module in this checkout, or the command ``hetero``, to its end; DVC by itself."""
        if module != "dvc":
            return self.begin(module, *arguments)()
        process = self.start(module, *arguments)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *command: str, **options: object) -> subprocess.Popen[str]:
        """Start a Python module of this checkout in it."""
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.root,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def repro(self, *options: str) -> Done:
        """``hetero repro`` in this checkout."""
        return self.call("pipelines.repro", *options)

    def change(self, name: str, old: str, new: str) -> None:
        """Replace text of one file."""
        path = self.root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def results(self) -> dict[str, bytes]:
        """Every file of results/."""
        files = [f for f in (self.root / "results").rglob("*") if f.is_file()]
        return {str(f.relative_to(self.root)): f.read_bytes() for f in sorted(files)}

    @property
    def lock(self) -> str:
        """Text of dvc.lock."""
        return (self.root / "dvc.lock").read_text()

    def commit(self) -> None:
        """Commit everything that git does not ignore."""
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["add", "--all"], [*who, "commit", "--quiet", "-m", "results"]):
            subprocess.run(["git", "-C", str(self.root), *command], check=True)

    def clone(self, target: Path) -> Project:
        """What another user gets: the commits and nothing else."""
        self.commit()
        subprocess.run(["git", "clone", "--quiet", str(self.root), str(target)], check=True)
        return Project(target)

    def copy(self, target: Path) -> Project:
        """The same checkout in another place."""
        shutil.copytree(self.root, target, symlinks=True)
        return Project(target)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project before its first run; copy it before changing it."""
    root = tmp_path_factory.mktemp("fresh") / "project"
    checkout = paths.root()
    skip = shutil.ignore_patterns("*.nb[ci]", "build", "fingerprints", "raw")
    for folder in ("hetero", "pipelines", "data"):
        shutil.copytree(checkout / folder, root / folder, ignore=skip)
    for name in (".dvcignore", ".gitignore", "pyproject.toml", "CITATION.cff"):
        shutil.copy(checkout / name, root / name)
    (root / ".dvc").mkdir()
    shutil.copy(checkout / ".dvc" / "config", root / ".dvc" / "config")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    with (root / "pipelines" / "sections.py").open("a") as stream:
        stream.write(SECTION)
    (root / "params.yaml").write_text(PARAMS)
    (root / "dvc.yaml").write_text(PIPELINE)
    (root / "notebooks").mkdir()
    tiny_notebook(root / "notebooks" / "01_tiny.ipynb")
    return Project(root)


@pytest.fixture(scope="session")
def ran(fresh: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project after one run; copy it before changing it."""
    project = fresh.copy(tmp_path_factory.mktemp("ran") / "project")
    done = project.repro()
    assert done.returncode == 0, done.stdout + done.stderr
    return project
