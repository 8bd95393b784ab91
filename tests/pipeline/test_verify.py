"""`hetero verify` in a small project: what comes out again, what does not, and by how much."""

from __future__ import annotations

from pipelines import verify
from tests.pipeline.conftest import Project


def _verify(project: Project, *options: str):
    return project.call("tests_main", "verify", *options)


def test_committed_results_come_out_again_and_a_changed_one_is_found(ran, tmp_path):
    project = ran.copy(tmp_path / "project")
    (project.root / "tests_main.py").write_text("from hetero.apps.cli import main\n\nmain()\n")
    apart = project.root / "results" / "paper" / "twin" / "01_tiny" / "points.csv"
    apart.parent.mkdir(parents=True)
    apart.write_text("x [s]\n1\n")
    line = "      - results/${workload"
    project.change("dvc.yaml", line, f"      - results/paper\n{line}")
    project.commit()
    done = _verify(project)
    assert done.returncode == 0, done.stderr
    assert "every result came out again" in done.stdout
    table = project.root / "results" / "twin" / "01_tiny" / "points.csv"
    text = table.read_text()
    table.write_text(text.replace("0.001", "0.00101"))
    project.commit()
    done = _verify(project)
    assert done.returncode == 1
    assert "points.csv" in done.stdout
    assert "0.0099" in done.stdout  # one per cent of the larger number
    assert "Traceback" not in done.stderr
    done = _verify(project, "--source", "real")
    assert done.returncode == 1
    assert "no results of the real traces" in done.stderr


def test_numbers_and_text_are_told_apart(tmp_path):
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("x,1.0000000001e-3,-5\n")
    b.write_text("x,1.0000000002e-3,-5\n")
    assert 0 < verify.difference(a, b) < verify.TOLERANCE
    b.write_text("y,1.0000000001e-3,-5\n")
    assert verify.difference(a, b) == float("inf")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("one", "two"):
        (tmp_path / name / "01_a").mkdir()
    (tmp_path / "one" / "01_a" / "gone.csv").write_text("1\n")
    (compared,) = verify.compare(tmp_path / "one", tmp_path / "two")
    assert (compared.changed, compared.worst) == (1, "gone.csv")


def test_numbers_that_are_close_are_not_reproduced(tmp_path):
    for name, digits in (("one", "0.1234567891"), ("two", "0.1234567892")):
        (tmp_path / name / "01_a").mkdir(parents=True)
        (tmp_path / name / "01_a" / "points.csv").write_text(f"x [s]\n{digits}\n")
    stages = verify.compare(tmp_path / "one", tmp_path / "two")
    assert (stages[0].close, stages[0].changed) == (1, 0)
    found = verify.Verified("0000000", "twin", stages)
    assert not found.reproduced
    assert "within 1e-06, but not every byte" in str(found)
    assert verify.Verified(
        "0000000", "twin", verify.compare(tmp_path / "one", tmp_path / "one")
    ).reproduced
