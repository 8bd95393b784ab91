"""Experiments with DVC's own commands: values by name, and a picture of each."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pipelines.conftest import Project


def test_two_experiments_are_compared_by_their_results(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    project.commit()
    done = project.call("dvc", "exp", "run", "-n", "wider", "-S", "tiny.scale=2.0")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = project.call("dvc", "exp", "show", "--csv")
    head, *rows = shown.stdout.splitlines()
    assert {"claims.reproduced", "reproduced.xiong", "tiny.scale"} <= set(head.split(","))
    assert any(row.startswith("wider,") for row in rows), shown.stdout
    done = project.call("dvc", "plots", "diff", "HEAD", "wider", "--json", "-o", "dvc_plots")
    (images,) = json.loads(done.stdout)["data"].values()
    pictures = [Path(image["url"]).read_bytes() for image in images]
    assert len(pictures) == 2
    assert pictures[0] != pictures[1]
