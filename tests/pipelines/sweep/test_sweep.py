"""Sweeps of a small notebook: resumed, killed, failing, hanging, on real clusters."""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

import hetero
from hetero.errors import DataError
from pipelines import guard
from pipelines.sweep import point, spec, workers
from tests.pipelines.conftest import (
    PATIENCE_S,
    Project,
    cell,
    descendants,
    ended,
    write_notebook,
)
from tests.serving import wait_until

PARAMETERS = """\
count: int = 1
scale: float = 1.0
kinds: list[str] = ["up"]
output: str = ""
profile: str = "interactive"
source: str = "twin"
"""

BODY = """\
import os
import time
import pandas as pd
from pathlib import Path
from pipelines.studies.results import ResultFolder

hold = Path(os.environ["SWEEP_HOLD"]) if "SWEEP_HOLD" in os.environ else None
if hold is not None:
    (hold / f"held-{os.getpid()}").touch()
    while not (hold / "go").exists():
        time.sleep(0.05)
marks = Path(os.environ["SWEEP_MARKS"]) if "SWEEP_MARKS" in os.environ else None
if marks is not None:
    (marks / f"{count}-{scale}-{os.getpid()}-{time.time_ns()}").touch()
while count == 4 and Path("hold").exists():
    time.sleep(0.05)
if count == 13:
    raise ValueError("thirteen is no count")
if count == 14:
    time.sleep(3600)
if count == 15:
    os.kill(os.getpid(), 9)
time.sleep(0.05)
out = ResultFolder("01_tiny", output=output, profile=profile, source=source, seeds=[0])
out.table(pd.DataFrame({"kind": kinds, "y [s]": [count * scale] * len(kinds)}), "y", caption="y")
"""

HELD = """\
import os, time
from pathlib import Path
from pipelines.sweep import point, workers

def held(*given):
    Path("{0}").touch()
    while not Path("{0}-go").exists():
        time.sleep(0.02)
    return before(*given)

before = {1}
{1} = held
"""

SWEEP = """\
stage: tiny
grid:
  count: [1, 2, 3, 4]
  scale: [0.5, 1.0, 2.0]
measures:
  y: {table: y, column: "y [s]", where: {kind: up}}
"""
HALF = SWEEP.replace("[1, 2, 3, 4]", "[1, 2]")


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays():
    """Sweeps that a failed test leaves waiting end with the tests."""
    with guard.ended_with_block(patience_s=0):
        yield


@pytest.fixture(scope="module")
def project(fresh: Project, tmp_path_factory) -> Project:
    made = fresh.copy(tmp_path_factory.mktemp("sweep") / "project")
    notebook = made.root / "notebooks" / "01_tiny.ipynb"
    parts = [cell("markdown", "# Tiny"), cell("code", PARAMETERS, tags=["parameters"])]
    write_notebook(notebook, *parts, cell("code", BODY))
    return made


def start(
    project: Project, text: str, folder: Path, *options: str, first: str = "", **environment: str
):
    file = folder.with_suffix(".yaml")
    file.write_text(text)
    command = f"{first}\nfrom hetero.apps.cli import main; main()"
    call = ["sweep", str(file), "--output", str(folder), "--workers", "2", *options]
    return subprocess.Popen(
        [sys.executable, "-c", command, *call],
        cwd=project.root,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def swept(project: Project, text: str, folder: Path, *options: str, **environment: str):
    """Exit code and what was said of a sweep whose points run in the warm process."""
    return begun(project, text, folder, *options, **environment)()


def begun(project: Project, text: str, folder: Path, *options: str, **environment: str):
    """The same, begun; called, it waits for the end."""
    file = folder.with_suffix(".yaml")
    file.write_text(text)
    end = project.begin(
        "hetero", "sweep", str(file), "--output", str(folder), *options, **environment
    )
    return lambda: ((done := end()).returncode, done.stdout, done.stderr)


def finish(process, seconds: float = PATIENCE_S) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def until_finished(process, folder: Path, count: int) -> None:
    """Wait until so many points are finished, or the sweep has ended."""
    wait_until(
        lambda: process.poll() is not None or len(list(folder.glob("points/[!.]*"))) >= count
    )


def expected() -> pd.DataFrame:
    rows = [(c, s, c * s) for c in (1, 2, 3, 4) for s in (0.5, 1.0, 2.0)]
    return pd.DataFrame(rows, columns=["count", "scale", "y"])


def check(folder: Path) -> None:
    found = pd.read_parquet(folder / "points.parquet")
    pd.testing.assert_frame_equal(found.drop(columns="point"), expected(), check_dtype=False)
    left = [*(folder / "points").glob(".*"), *(folder / "running").glob("*")]
    assert not left, "half-written points are left"


# Moments are counted in points, so that a slow machine is killed as far in as a fast one.
@pytest.mark.parametrize(
    "moments", [(1, 8), pytest.param((0, 1, 4, 8, 11), marks=pytest.mark.slow)]
)
def test_a_sweep_killed_at_random_moments_ends_as_an_uninterrupted_one(project, tmp_path, moments):
    code, _, err = swept(project, SWEEP, tmp_path / "whole")
    assert code == 0, err
    whole = (tmp_path / "whole" / "points.csv").read_bytes()
    rng = random.Random(len(moments))
    folder = tmp_path / "killed"
    for most in moments:
        process = start(project, SWEEP, folder)
        until_finished(process, folder, most)
        time.sleep(rng.uniform(0.0, 0.1 if most else 1.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        for each in folder.glob("points/[!.]*"):
            assert (each / "point.json").is_file(), "a half-written point counts as finished"
    # Children of the last that was killed may hold its lock for a moment longer.
    for lock in folder.glob("running/*.lock"):
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    code, _, err = swept(project, SWEEP, folder)
    assert code == 0, err
    assert (folder / "points.csv").read_bytes() == whole
    check(folder)


def test_failing_hanging_and_deadly_points_are_listed_and_the_others_stay(project, tmp_path):
    text = """\
stage: tiny
points: [{count: 1}, {count: 13}, {count: 14}, {count: 15}, {count: 2}]
fixed: {scale: 2.0}
measures:
  y: {table: y, column: "y [s]", where: {kind: up}}
limit_s: 15
"""
    folder = tmp_path / "bad"
    code, out, err = finish(start(project, text, folder))
    assert code == 1
    assert "3 of 5 points failed" in err
    assert "thirteen is no count" in out
    assert "past its limit of 15 s" in out
    assert "worker died" in out
    assert "Traceback" not in err
    assert list(pd.read_parquet(folder / "points.parquet")["y"]) == [2.0, 4.0]
    reasons = [json.loads(path.read_text()) for path in folder.glob("failed/*.json")]
    raised = next(one for one in reasons if one["swept"]["count"] == 13)
    assert "ValueError" in raised["traceback"]


@pytest.fixture(scope="module")
def half(project, tmp_path_factory) -> Path:
    """A sweep that has ended, of the first half of the points; copy it before changing it."""
    folder = tmp_path_factory.mktemp("half") / "sweep"
    assert swept(project, HALF, folder)[0] == 0
    assert len(list(folder.glob("points/*"))) == 6
    return folder


def test_what_is_finished_is_not_run_again_and_new_points_are_added(project, half, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    folder = shutil.copytree(half, tmp_path / "grown")
    code, out, _ = swept(project, SWEEP, folder, "--json", SWEEP_MARKS=str(marks))
    assert code == 0
    assert json.loads(out)["planned"] == 12
    assert len(list(marks.iterdir())) == 6
    check(folder)


def test_two_sweeps_at_once_share_a_folder(project, tmp_path):
    folder = tmp_path / "shared"
    both = [begun(project, SWEEP, folder) for _ in range(2)]
    assert [end()[0] for end in both] == [0, 0]
    check(folder)


def test_one_worker_takes_one_point_at_a_time(tmp_path, monkeypatch):
    busy, found = threading.Lock(), []

    def run(job, own):
        found.append(busy.locked())
        with busy:
            time.sleep(0.02)
        job.target.mkdir()

    monkeypatch.setattr(point, "run", run)
    threads = {"backend": "threading", "n_jobs": 2}  # in place of two processes
    monkeypatch.setattr(workers, "_backend", lambda *_: nullcontext(threads))
    workers.run_all(
        [point.Job("", str(tmp_path), str(k), "", {}, {}, 1.0) for k in range(4)], workers=1
    )
    assert found == [False] * 4


def test_a_sweep_that_starts_amid_another_leaves_its_points_alone(project, tmp_path):
    folder = tmp_path / "amid"

    def started(name: str, function: str):
        mark = tmp_path / name
        end = begun(project, SWEEP, folder, WARM_FIRST=HELD.format(mark, function))
        wait_until(mark.exists)
        return end, tmp_path / f"{name}-go"

    # What a busy machine does by itself: workers of the first sweep have noted their points and
    # still import when the second starts, whose own workers are not there yet.
    first, let_first = started("first", "point._prepare")
    second, let_second = started("second", "workers._run")
    for let, end in ((let_first, first), (let_second, second)):
        let.touch()
        code, out, err = end()
        assert code == 0, out + err
    check(folder)


def test_a_killed_sweep_takes_its_workers_along_and_the_next_cleans_up(project, tmp_path):
    folder, marks = tmp_path / "orphans", tmp_path / "marks"
    marks.mkdir()
    process = start(project, SWEEP, folder, SWEEP_HOLD=str(marks))
    wait_until(lambda: len(list(marks.glob("held-*"))) == 2 or process.poll() is not None)
    family = descendants(process.pid)
    assert len(family) >= 2
    process.kill()
    process.communicate()
    ended(family)
    assert list(folder.glob("running/*/*")), "nothing was half-written: the test shows nothing"
    code, _, err = swept(project, SWEEP, folder)
    assert code == 0, err
    check(folder)


def test_what_a_living_sweep_has_half_written_is_left_to_it(project, tmp_path):
    folder, marks = tmp_path / "living", tmp_path / "marks"
    marks.mkdir()
    end = begun(project, SWEEP, folder, SWEEP_HOLD=str(marks))
    wait_until(lambda: len(list(marks.glob("held-*"))) == 1)
    before = sorted(folder.glob("running/*/*"))
    assert before
    dead = folder / "running" / "0123456789abcdef"
    (dead / "half").mkdir(parents=True)
    dead.with_suffix(".lock").touch()
    code, _, err = swept(project, SWEEP, folder)
    assert code == 0, err
    assert not dead.exists()
    assert not dead.with_suffix(".lock").exists()
    assert sorted(folder.glob("running/*/*")) == before
    (marks / "go").touch()
    assert end()[0] == 0
    check(folder)


@pytest.mark.parametrize("place", ["file/folder", "/proc/nowhere"])
def test_a_folder_that_cannot_be_made_is_one_sentence_at_once(project, tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    call = ["sweep", str(tmp_path / "sweep.yaml"), "--output", str(tmp_path / place)]
    done = project.call("hetero", *call)
    assert done.returncode == 1
    assert "The sweep cannot write to" in done.stderr
    assert done.stderr.count("Resolve:") == 1


def test_a_full_disk_keeps_what_is_finished(project, half, tmp_path):
    folder = shutil.copytree(half, tmp_path / "full")
    # A process that may not write files longer than this gets the error of a full disk.
    first = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)); "
    first += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    # Python takes a byte code file that was cut short for a whole one.
    process = start(project, SWEEP, folder, first=first, PYTHONDONTWRITEBYTECODE="1")
    code, _, err = finish(process)
    assert code == 1
    assert "The sweep cannot write to" in err
    assert err.count("Resolve:") == 1
    assert "Traceback" not in err
    # What is half-written gives its space back, without waiting for a run that succeeds.
    assert not list((folder / "running").iterdir())
    assert len(pd.read_csv(folder / "points.csv")) == 6
    assert swept(project, SWEEP, folder)[0] == 0
    check(folder)


@pytest.mark.slow
def test_a_search_asks_for_full_batches_and_goes_on_where_it_stopped(project, tmp_path):
    pytest.importorskip("ax", reason="the bayes extra is not installed")
    text = """\
stage: tiny
search:
  trials: 12
  batch: 4
  ranges:
    count: {low: 1, high: 9, whole: true}
    scale: {low: 0.1, high: 10.0, log: true}
  maximise: y
measures:
  y: {table: y, column: "y [s]", where: {kind: up}}
"""
    folder = tmp_path / "search"
    first = start(project, text.replace("trials: 12", "trials: 4"), folder)
    code, _, err = finish(first)
    assert code == 0, err
    code, _, err = finish(start(project, text, folder))
    assert code == 0, err
    found = pd.read_parquet(folder / "points.parquet")
    assert len(found) >= 10  # whole counts may coincide
    # Tables hold ten digits.
    assert (found["y"] / (found["count"] * found["scale"]) - 1).abs().max() < 1e-9
    assert found["y"].max() > 40


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_a_cluster_gives_the_same_table_though_a_worker_is_killed(project, tmp_path, kind):
    pytest.importorskip({"dask": "distributed", "ray": "ray"}[kind])
    from tests.pipelines.sweep import clusters

    folder = tmp_path / kind
    with clusters.running(kind, project.root, tmp_path) as cluster:
        hold = project.root / "hold"
        hold.touch()  # the last points wait, so that a worker is killed while there is work
        try:
            on = f"{kind}:{cluster.address}"
            process = start(project, SWEEP, folder, "--on", on, **clusters.RAY)
            until_finished(process, folder, 1)
            assert process.poll() is None, process.communicate()
            cluster.kill_a_worker()
        finally:
            hold.unlink()
        code, _, err = finish(process)
        assert code == 0, err
    check(folder)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("stage: tiny", "stage: tinny", r"no stage 'tinny'.*did you mean"),
        ("count: [1, 2, 3, 4]", "counts: [1]", r"'tiny.counts': no parameter"),
        ("count: [1, 2, 3, 4]", "count: [0]", "greater than or equal to 1"),
        ("count: [1, 2, 3, 4]", "count: []", "at least 1 item"),
        ("grid:", "grids:", "grids"),
        ("measures:", "sobol: {count: 4, ranges: {scale: {low: 2, high: 1}}}\nmeasures:", "range"),
        ('column: "y [s]", ', "", "needs 'table' and 'column'"),
        ("count: [1, 2, 3, 4]", "count: &a [1]\n  scale2: *a", "aliases"),
    ],
)
def test_a_wrong_sweep_file_is_refused_with_its_reason(project, tmp_path, old, new, says):
    assert old in SWEEP
    code, _, err = swept(project, SWEEP.replace(old, new), tmp_path / "wrong")
    assert code == 1
    assert "Resolve:" in err
    assert "Traceback" not in err
    assert re.search(says, err), err
    assert not (tmp_path / "wrong").exists()


def test_a_measure_that_is_not_there_names_what_is(project, tmp_path):
    text = SWEEP.replace("[1, 2, 3, 4]", "[1]").replace('"y [s]"', "z")
    code, _, err = swept(project, text, tmp_path / "measure")
    assert code == 1
    assert "no column 'z'" in err
    assert "kind, y [s]" in err


def test_a_measure_may_look_up_the_points_own_value(project, tmp_path):
    text = SWEEP.replace("count: [1, 2, 3, 4]", "kinds: [up, down]").replace(
        "[0.5, 1.0, 2.0]", "[3]"
    )
    own = text.replace("{kind: up}", "{kind: {parameter: kinds}}")
    code, _, err = swept(project, own, tmp_path / "own")
    assert code == 0, err
    found = pd.read_parquet(tmp_path / "own" / "points.parquet")
    assert found[["kinds", "y"]].values.tolist() == [
        ["up", 9.0],
        ["down", 9.0],
    ]  # count 3 x scale 3
    # A fixed kind is missing from the table of the other point.
    code, _, err = swept(project, text, tmp_path / "own")
    assert code == 1
    assert "no row of 'y' has kind = 'up'" in err
    wrong = own.replace("parameter: kinds", "parameter: sort")
    code, _, err = swept(project, wrong, tmp_path / "own")
    assert code == 1
    assert "names no parameter" in err


@pytest.mark.parametrize("file", sorted(Path("pipelines/sweeps").glob("*.yaml")), ids=str)
def test_ready_sweeps_fit_their_notebooks(file):
    found = spec.read(file)
    values = math.prod(map(len, found.along.values()))
    assert len(spec.points(found, file.name)) * values >= 12


@pytest.mark.parametrize("name", ["bins", "mix", "prediction", "skew", "targets", "theta"])
def test_committed_sweeps_are_those_of_their_files(name):
    loaded = hetero.sweeps.load(name)
    found, kept, points = loaded.spec, loaded.effects, loaded.frame
    written = pd.read_csv(loaded.folder / "effects.csv")
    pd.testing.assert_frame_equal(kept, written, check_dtype=False, rtol=1e-7)
    assert loaded.says == (loaded.folder / "sentences.txt").read_text().splitlines()
    assert len(loaded.says) == len(found.measures)
    assert f"{len(points)} of {loaded.planned} points" in str(loaded)
    assert len(points) == len(spec.points(found)) * math.prod(map(len, found.along.values()))
    (swept,) = found.swept
    for measure, one in found.measures.items():
        own = kept[kept["measure"] == measure]
        assert len(own) == points[swept].nunique()
        assert own["change low"].notna().sum() == len(own) - 1
        if one.within:
            assert own["low"].ge(one.within[0]).all()
            assert own["high"].le(one.within[1]).all()


def test_values_along_one_run_are_read_as_if_each_had_run_alone(project, tmp_path):
    along = SWEEP.replace("grid:", "along:").replace("  count: [1, 2, 3, 4]\n", "")
    along = along.replace("scale: [0.5, 1.0, 2.0]", "kinds: [up, down]")
    along = along.replace("kind: up", "kind: {parameter: kinds}") + "repeat:\n  count: [1, 2]\n"
    along += "fixed: {scale: 1.0}\nagainst: {kinds: up}\n"
    code, out, err = swept(project, along, tmp_path / "along")
    assert code == 0, err
    assert "4 of 4 points finished" in out
    found = pd.read_parquet(tmp_path / "along" / "points.parquet")
    assert sorted(found[["kinds", "count", "y"]].values.tolist()) == [
        ["down", 1, 1.0],
        ["down", 2, 2.0],
        ["up", 1, 1.0],
        ["up", 2, 2.0],
    ]
    assert found["point"].nunique() == 2
    assert (tmp_path / "along" / "sentences.txt").is_file()


def test_sobol_points_fill_their_ranges():
    design = spec.Sobol(
        count=64,
        ranges={
            "a": spec.Range(low=1, high=100, log=True),
            "b": spec.Range(low=0, high=9, whole=True),
        },
    )
    found = pd.DataFrame(spec._sobol(design))
    assert found["a"].between(1, 100).all()
    assert abs((found["a"] < 10).mean() - 0.5) < 0.05
    assert set(found["b"]) == set(range(10))
    with pytest.raises(ValueError, match="range by ratio"):
        spec.Range(low=0, high=1, log=True)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        spec.read(tmp_path / "none.yaml")
