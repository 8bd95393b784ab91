"""What makes results stale, what does not, and what ``hetero status`` says about it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pipelines.conftest import Project, tiny_notebook

NOTEBOOK = "notebooks/01_tiny.ipynb"


def ask(project: Project) -> str:
    done = project.call("hetero", "status")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prose_outputs_and_comments_make_nothing_stale(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    path = project.root / NOTEBOOK
    tiny_notebook(path, prose="Quite another question.")
    # As JupyterLab saves a notebook that was run.
    saved = json.loads(path.read_text())
    for number, cell in enumerate(saved["cells"]):
        cell["id"] = f"other-{number}"
        if cell["cell_type"] == "code":
            cell["execution_count"] = number
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "hello\n"}]
            cell["source"] = cell["source"].splitlines(keepends=True)
    saved["metadata"]["widgets"] = {"state": {}}
    path.write_text(json.dumps(saved, indent=2))
    with (project.root / "pipelines" / "studies" / "results.py").open("a") as stream:
        stream.write("# changed\n")
    assert "stale" not in ask(project)
    done = project.repro()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was run" in done.stdout
    assert project.results() == ran.results()


def test_code_makes_its_stage_and_the_report_stale(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    project.change(NOTEBOOK, "scale * k", "2 * scale * k")
    said = ask(project)
    assert "tiny    stale  the code of notebooks/01_tiny.ipynb changed  hetero repro" in said
    assert "report  stale  it shows the results of tiny" in said
    done = project.repro()
    assert "Ran tiny, report" in done.stdout
    assert project.results() != ran.results()
    said = ask(project)
    assert "tiny    fresh" in said
    assert "report  fresh" in said


def test_reasons_are_said_in_words(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    project.change("params.yaml", "  count: 3 ", "  count: 4 ")
    with (project.root / "pipelines" / "studies" / "results.py").open("a") as stream:
        stream.write("CHANGED = 1\n")
    (project.root / "results" / "twin" / "01_tiny" / "points.csv").write_text("x [s]\n9\n")
    said = ask(project)
    for words in (
        "tiny.count: 3 -> 4",
        "the code of pipelines/studies/results.py changed",
        "results/twin/01_tiny changed",
    ):
        assert words in said


def test_a_clone_names_modules_that_were_committed_without_a_run(
    ran: Project, tmp_path: Path
) -> None:
    project = ran.copy(tmp_path / "p")
    project.commit()
    with (project.root / "hetero" / "paths.py").open("a") as stream:
        stream.write("CHANGED = 1\n")
    assert "the code of hetero/paths.py changed" in ask(project)
    said = ask(project.clone(tmp_path / "clone"))
    assert "tiny    stale  the code of hetero/paths.py changed" in said
    assert "report  stale  it shows the results of tiny" in said


def test_a_list_that_is_missing_or_damaged_is_written_anew(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    file = project.root / "pipelines" / "fingerprints" / "01_tiny"
    was = file.read_bytes()
    for damage in (file.unlink, lambda: file.write_bytes(b"<<<<<<< HEAD\n\xff\n")):
        damage()
        done = project.call("pipelines.run", "tiny")
        assert done.stderr == (
            "Error: pipelines/fingerprints/01_tiny is not what 01_tiny.ipynb and the modules it "
            "imports are now. Resolve: run `hetero repro`, or `python -m pipelines.dependencies` "
            "first.\n"
        )
        done = project.call("dvc", "repro")
        assert "Running stage 'tiny" not in done.stdout
        assert file.read_bytes() == was
    project.change("pipelines/studies/results.py", "def ", "def (")
    assert "results.py, line " in (said := project.call("hetero", "status").stderr)
    assert ": This is no Python (" in said


def test_status_before_the_first_run(fresh: Project, tmp_path: Path) -> None:
    project = fresh.copy(tmp_path / "p")
    assert "tiny    missing  it has never run" in ask(project)


def test_bytecode_and_checkpoints_make_nothing_stale(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    for folder in ("__pycache__", ".ipynb_checkpoints"):
        made = project.root / "results" / "twin" / "01_tiny" / folder
        made.mkdir()
        (made / "x.pyc").write_text("")
    assert "tiny    fresh" in ask(project)
