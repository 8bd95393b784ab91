"""The stage runner, driven as a user drives it: through DVC, in a checkout of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project, tiny_notebook

NOTEBOOK = "notebooks/01_tiny.ipynb"


def test_first_run_leaves_complete_results(ran: Project) -> None:
    folder = ran.root / "results" / "twin" / "01_tiny"
    assert sorted(p.name for p in folder.iterdir()) == [
        "01_tiny.ipynb",
        "line.svg",
        "manifest.json",
        "points.csv",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["source"], manifest["profile"]) == ("twin", "default")
    # 1.0e-3 is a number in YAML 1.2 and 1.1 alike; it must arrive as one.
    assert manifest["parameters"] == {"count": 3, "scale": 0.001, "kinds": ["up", "down"]}
    executed = (folder / "01_tiny.ipynb").read_text()
    # A figure is a link to its file, not a second copy of it.
    assert "![line](line.svg)" in executed
    assert "image/png" not in executed
    assert "written to results/twin/01_tiny" in executed
    assert str(ran.root) not in executed
    assert not list((ran.root / "pipelines" / "build" / "run").rglob("*.*"))


def test_second_run_does_nothing(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    done = project.repro()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was run" in done.stdout
    assert project.results() == before


def test_two_runs_leave_the_same_bytes(ran: Project, fresh: Project, tmp_path: Path) -> None:
    project = fresh.copy(tmp_path / "another folder")
    done = project.repro()
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.results() == ran.results()
    assert project.lock == ran.lock


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  count: 3 ", "  cuont: 3 ", ["'tiny.cuont'", "did you mean count?"]),
        ("  count: 3 ", '  count: "3" ', ["'tiny.count'", "'3' (text)", "whole number"]),
        ("  count: 3 ", "  count: 0 ", ["'tiny.count'", "greater than or equal to 1"]),
        ("scale: 1.0e-3", "scale: yes", ["'tiny.scale'", "'yes' (text)", "write a number"]),
        ("    count: 2", "    conut: 2", ["'tiny.smoke.conut'", "did you mean count?"]),
        ("source: twin ", "source: twn ", ["'workload.source'", "'twn'", "did you mean twin?"]),
        ("kinds: [up, down]", "kinds: [up, donw]", ["'tiny.kinds.1'", "'donw'"]),
        ("  scale: 1.0e-3\n", "", ["'tiny.scale'", "missing", "width of the curve"]),
        ("profile: default", "profile: quick", ["'profile'", "'quick'", "'smoke'"]),
    ],
)
def test_wrong_parameter_ends_in_one_sentence(
    ran: Project, tmp_path: Path, old: str, new: str, said: list[str]
) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    project.change("params.yaml", old, new)
    # Through the command, which checks first, and through the stage, which plain DVC would call.
    for command in (["pipelines.repro"], ["pipelines.run", "tiny"]):
        done = project.call(*command)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("Error: params.yaml, ")
        assert done.stderr.count("Resolve:") == 1
        for words in said:
            assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert project.results() == before


def test_unknown_source_asked_for_changes_nothing(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    text = (project.root / "params.yaml").read_text()
    done = project.repro("--source", "reel")
    assert done.returncode == 1
    assert "did you mean real?" in done.stderr
    assert (project.root / "params.yaml").read_text() == text


def test_choice_of_profile_edits_one_line(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    text = (project.root / "params.yaml").read_text()
    done = project.repro("--profile", "smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "profile default -> smoke" in done.stdout
    now = (project.root / "params.yaml").read_text()
    pairs = zip(text.split("\n"), now.split("\n"), strict=True)
    (changed,) = [pair for pair in pairs if pair[0] != pair[1]]
    assert changed[0].startswith("profile: default ")
    assert changed[1].startswith("profile: smoke ")
    manifest = project.root / "results" / "twin" / "01_tiny" / "manifest.json"
    assert json.loads(manifest.read_text())["parameters"]["count"] == 2
    project.repro("--profile", "default")
    assert (project.root / "params.yaml").read_text() == text
    assert project.results() == ran.results()


def test_change_that_the_profile_replaces_is_refused(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    project.change("params.yaml", "profile: default", "profile: smoke")
    project.commit()
    before = project.results()
    done = project.call("pipelines.run", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke profile: count come from tiny.smoke; values above it" in done.stdout
    project.change("params.yaml", "  count: 3 ", "  count: 5 ")
    for command in (["pipelines.repro"], ["pipelines.run", "tiny"]):
        done = project.call(*command)
        assert done.returncode == 1
        assert done.stderr == (
            "Error: smoke profile: count is 2; tiny.count, changed to 5, has no effect. "
            "Resolve: set tiny.smoke.count, or choose another profile.\n"
        )
    project.change("params.yaml", "  count: 5 ", "  count: 3 ")
    project.change("params.yaml", "  scale: 1.0e-3", "  scale: 2.0e-3")
    done = project.call("pipelines.run", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.results() != before


def test_names_of_notebook_and_section_must_agree(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    project.change(NOTEBOOK, "count: int = 1", "counts: int = 1")
    done = project.repro()
    assert done.returncode == 1
    assert "01_tiny.ipynb has no parameter 'count'" in done.stderr
    assert "did you mean counts" in done.stderr
    project.change(NOTEBOOK, "counts: int = 1", "count: int = 1\\nextra = 2")
    done = project.repro()
    assert "has a parameter 'extra'" in done.stderr
    assert project.results() == before


def test_failing_cell_is_quoted_and_earlier_results_stay(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    tiny_notebook(
        project.root / NOTEBOOK,
        last='x = 1\n(out.folder / "line.svg").unlink()\nraise ValueError("too wide")\ny = 2',
    )
    done = project.repro()
    assert done.returncode == 1
    assert project.results() == before
    assert "01_tiny.ipynb failed in cell [4]: ValueError: too wide" in done.stdout
    assert '>   3 | raise ValueError("too wide")' in done.stdout
    assert "Stage tiny failed" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert (project.root / "pipelines" / "build" / "01_tiny.failed.ipynb").is_file()


def test_missing_file_of_the_manifest_is_an_error(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    tiny_notebook(project.root / NOTEBOOK, last='(out.folder / "points.csv").unlink()')
    done = project.repro()
    assert done.returncode == 1
    assert "names points.csv" in done.stdout
    assert project.results() == before


def test_code_that_changes_during_the_run_discards_it(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    module = "hetero/results.py"
    tiny_notebook(
        project.root / NOTEBOOK,
        last=f'with open("{module}", "a") as stream:\n    stream.write("# later\\n")',
    )
    done = project.repro()
    assert done.returncode == 1
    assert f"{module} changed while stage 'tiny' ran" in done.stdout
    assert project.results() == before
