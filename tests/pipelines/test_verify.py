"""`hetero verify` in a small project: what comes out again, what does not, and by how much."""

from __future__ import annotations

import pytest

from pipelines import verify


@pytest.mark.parametrize("changed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_committed_results_come_out_again_and_a_changed_one_is_found(ran, tmp_path, changed):
    project = ran.copy(tmp_path / "project")
    apart = project.root / "results" / "paper" / "twin" / "01_tiny" / "points.csv"
    apart.parent.mkdir(parents=True)
    apart.write_text("x [s]\n1\n")
    line = "      - results/${workload"
    project.change("dvc.yaml", line, f"      - results/paper\n{line}")
    if changed:
        project.change("results/twin/01_tiny/points.csv", "0.001", "0.00101")
    project.commit()
    done = project.call("hetero", "verify")
    assert done.returncode == changed, done.stderr
    assert ("every result came out again" in done.stdout) != changed
    assert ("points.csv" in done.stdout) == changed
    assert ("0.0099" in done.stdout) == changed  # one per cent of the larger number
    row = next(line for line in done.stdout.splitlines() if "01_tiny" in line)
    assert row.split()[:4] == ["01_tiny", *map(str, (4 - changed, 0, int(changed)))]
    assert "Traceback" not in done.stderr
    done = project.call("hetero", "verify", "--source", "real")
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


def test_a_manifest_allows_its_tables_a_tolerance(tmp_path):
    for name, value, drawn in (("one", 95, "a"), ("two", 80, "b")):
        folder = tmp_path / name / "07_a"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"tolerance": 0.2}')
        (folder / "found.csv").write_text(f"R,D\n{value},100\n0,{100 - value}\n")
        (folder / "found.svg").write_text(drawn)
    (stage,) = verify.compare(tmp_path / "one", tmp_path / "two")
    assert (stage.identical, stage.close, stage.changed) == (1, 2, 0)
    assert stage.largest == pytest.approx(0.15)
    assert verify.Verified("0000000", "twin", (stage,)).reproduced
    (tmp_path / "two" / "07_a" / "found.csv").write_text("R,D\n74,100\n0,26\n")
    (stage,) = verify.compare(tmp_path / "one", tmp_path / "two")
    assert (stage.changed, stage.worst) == (1, "found.csv")


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
