"""The stage runner, driven as a user drives it: through DVC, in a checkout of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hetero import paths
from pipelines import guard, repro
from tests.pipelines.conftest import PATIENCE_S, Project, descendants, ended, tiny_notebook

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


def test_paper_profile_is_kept_apart_and_without_its_notebook(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    project.change("params.yaml", "  smoke:\n", "  paper:\n    count: 5\n  smoke:\n")
    project.commit()
    done = project.call("pipelines.run", "tiny", "--paper")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = project.root / "results" / "paper" / "twin" / "01_tiny"
    default = {one.name for one in (ran.root / "results" / "twin" / "01_tiny").iterdir()}
    assert {one.name for one in folder.iterdir()} == default - {"01_tiny.ipynb"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["profile"], manifest["parameters"]["count"]) == ("paper", 5)
    kept = {k: v for k, v in project.results().items() if not k.startswith("results/paper")}
    assert kept == ran.results()


def test_two_runs_leave_the_same_bytes(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "another folder")
    for left in ("results", ".dvc/tmp", ".dvc/cache", "pipelines/fingerprints"):
        shutil.rmtree(project.root / left, ignore_errors=True)
    (project.root / "dvc.lock").unlink()
    done = project.repro()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran tiny, report" in done.stdout
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
            "Resolve: set tiny.smoke.count, or choose another profile; `git "
            "checkout params.yaml` takes the change back.\n"
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
    assert project.call("pipelines.dependencies").returncode == 0
    done = project.call("pipelines.run", "tiny")
    assert done.returncode == 1
    assert "names points.csv" in done.stderr
    assert project.results() == before


def test_code_that_changes_during_the_run_discards_it(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    module = "pipelines/studies/results.py"
    tiny_notebook(
        project.root / NOTEBOOK,
        last=f'with open("{module}", "a") as stream:\n    stream.write("LATER = 1\\n")',
    )
    assert project.call("pipelines.dependencies").returncode == 0
    done = project.call("pipelines.run", "tiny")
    assert done.returncode == 1
    assert f"{module} changed while stage 'tiny' ran" in done.stderr
    assert project.results() == before


SLEEPS = """\
import os, subprocess, time
from pathlib import Path

if not Path("let-go").exists():
    # A child in a session of its own, as servers and pools of workers are.
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    Path("asleep").write_text(str(child.pid))
    while not Path("let-go").exists():
        time.sleep(0.05)
    child.kill()
"""


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays():
    """Runs that a failed test leaves waiting end with the tests."""
    with guard.ended_with_block(patience_s=0):
        yield


def asleep(project: Project, *command: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A run whose notebook waits, and all processes below it."""
    tiny_notebook(project.root / NOTEBOOK, last=SLEEPS)
    process = project.start(*(command or ("pipelines.repro",)), start_new_session=True)
    end, mark = time.monotonic() + PATIENCE_S, project.root / "asleep"
    while not (mark.is_file() and mark.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the notebook does not start"
        time.sleep(0.05)
    return process, descendants(process.pid)


OTHERS = pytest.param((signal.SIGTERM, signal.SIGHUP), marks=pytest.mark.slow)


@pytest.mark.parametrize("numbers", [(signal.SIGKILL, signal.SIGINT), OTHERS], ids=str)
def test_a_killed_run_leaves_no_process_behind(
    ran: Project, tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    for number in numbers:
        _killed(project, number)
        assert project.results() == before
    # Nothing is in the way of the next, and nobody is told to remove a file.
    (project.root / "let-go").touch()
    done = project.repro()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rwlock" not in done.stdout + done.stderr
    assert not list((project.root / "pipelines" / "build" / "run").rglob("*.*"))


def _killed(project: Project, number: signal.Signals) -> None:
    (project.root / "asleep").unlink(missing_ok=True)
    process, family = asleep(project)
    try:
        names = [" ".join(one.cmdline()) for one in family]
        for part in ("dvc repro", "pipelines.run tiny", "ipykernel_launcher", "sleep 3600"):
            assert any(part in name for name in names), names
        process.send_signal(number)  # to this process alone
        process.communicate(timeout=PATIENCE_S)
        ended(family)
    finally:
        for one in family:
            if one.is_running():
                one.kill()
    assert process.returncode != 0


def test_a_second_run_is_told_who_runs(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    process, _ = asleep(project)
    try:
        text = (project.root / "params.yaml").read_text()
        done = project.repro("--profile", "smoke")
        assert done.returncode == 1
        assert done.stdout == ""
        assert f"Another `hetero repro` runs in {project.root} (pid {process.pid}, since 2" in (
            done.stderr
        )
        assert done.stderr.count("Resolve:") == 1
        assert (project.root / "params.yaml").read_text() == text
    finally:
        (project.root / "let-go").touch()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err


def test_dvc_run_by_hand_is_named_and_a_dead_one_is_no_obstacle(
    ran: Project, tmp_path: Path
) -> None:
    project = ran.copy(tmp_path / "p")
    process, family = asleep(project, "dvc", "repro")
    try:
        done = project.repro()
        assert done.returncode == 1
        said = done.stdout + done.stderr
        assert "Another DVC command works in this checkout" in said
        assert "remove" not in said
        assert "rwlock" not in said
        assert done.stderr.count("Resolve:") == 1
    finally:
        for one in (psutil.Process(process.pid), *family):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
    # Its lock stays behind, and its number may be another's by now: here, that of the tests.
    file = project.root / ".dvc" / "tmp" / "rwlock"
    left = json.loads(file.read_text())
    assert any(left.values())
    file.write_text(file.read_text().replace(f'"pid": {process.pid}', f'"pid": {os.getppid()}'))
    (project.root / "let-go").touch()
    done = project.repro()
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_dvc_says_of_a_lock_becomes_who_holds_it() -> None:
    progress = repro.Progress()
    lines = [
        "ERROR: failed to reproduce 'tiny@twin': '/p/x.py' is busy, it is being blocked by:\n",
        "  (PID 4711): dvc repro\n",
        "\n",
        "If there are no processes with such PIDs, you can manually remove '/p/rwlock' and try\n",
    ]
    assert list(repro.readable(lines, progress)) == []
    assert progress.locked
    assert progress.blocker == " (`dvc repro`, pid 4711)"


def test_results_set_aside_by_a_killed_run_come_back(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    before = project.results()
    aside = project.root / "pipelines" / "build" / "run" / "twin"
    aside.mkdir(parents=True, exist_ok=True)
    (project.root / "results" / "twin" / "01_tiny").rename(aside / "01_tiny.old")
    tiny_notebook(project.root / NOTEBOOK, last='raise ValueError("no new ones")')
    assert project.call("pipelines.dependencies").returncode == 0
    done = project.call("pipelines.run", "tiny", "--source", "twin")
    assert done.returncode == 1
    assert "no new ones" in done.stderr
    assert project.results() == before


def test_parameters_are_whole_though_the_disk_fills_up(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p")
    file = project.root / "params.yaml"
    text = file.read_text()
    # A process that may not write files longer than this gets the error of a full disk.
    program = (
        "import resource, signal, sys; from pathlib import Path; from pipelines import repro\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "list(repro.choose(Path('params.yaml'), profile='smoke', traces=None))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project.root,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert file.read_text() == text
    assert not list(project.root.glob(".*.params.yaml"))


def test_a_choice_changes_no_line_but_its_own(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((paths.root() / "params.yaml").read_text())
    before = path.read_text().splitlines()
    assert list(repro.choose(path, profile="smoke", traces="real"))
    after = path.read_text().splitlines()
    assert len(before) == len(after)
    changed = [
        new.split("#")[0].strip() for old, new in zip(before, after, strict=True) if old != new
    ]
    assert changed == ["profile: smoke", "source: real"]
    assert list(repro.choose(path, profile="default", traces="twin"))
    assert path.read_text().splitlines() == before
