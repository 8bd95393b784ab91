"""What somebody gets who clones: results that are up to date, and links that lead somewhere."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from hetero import paths
from pipelines import source
from tests.pipelines.conftest import Project
from tests.pipelines.links import dead


def test_results_are_up_to_date_in_a_clone_without_a_cache(ran: Project, tmp_path: Path) -> None:
    project = ran.copy(tmp_path / "p").clone(tmp_path / "clone")
    assert not (project.root / ".dvc" / "cache").exists()
    said = project.call("hetero", "status").stdout
    assert "tiny    fresh" in said
    assert "report  fresh" in said
    done = project.call("dvc", "status")
    assert "Data and pipelines are up to date." in done.stdout, done.stdout + done.stderr
    done = project.repro()
    assert "nothing was run" in done.stdout, done.stdout + done.stderr


def test_no_dead_link_in_the_clone_of_a_small_project(ran: Project, tmp_path: Path) -> None:
    root = ran.copy(tmp_path / "p").clone(tmp_path / "clone").root
    page = root / "results" / "pages" / "twin" / "01_tiny.html"
    text = page.read_text()
    assert 'src="../../twin/01_tiny/line.svg"' in text
    assert "written to results/twin/01_tiny" in text
    assert "data:image/png" not in text
    assert dead(page, root) == []
    # Papers' drawings and data are not part of the small project; the run's own links are.
    report = [link for link in dead(root / "results" / "report.html", root) if "01_tiny" in link]
    assert report == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="#here"><a href="#gone"><img src="b">')
    (tmp_path / "README.md").write_text("# Some, heading\n[a](a.html#here) [b](#some-heading)\n")
    assert dead(tmp_path / "a.html", tmp_path) == ["a.html: #gone", "a.html: b"]
    assert dead(tmp_path / "README.md", tmp_path) == []
    (tmp_path / "README.md").write_text("[a](a.html#gone) `[c](d)` [up](../x.md)\n")
    assert dead(tmp_path / "README.md", tmp_path) == [
        "README.md: ../x.md",
        "README.md: a.html#gone",
    ]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last commit of this checkout, in a folder of its own."""
    root = paths.root()
    if not (root / ".git").exists():
        pytest.skip("this is no git checkout")
    target = tmp_path_factory.mktemp("clone") / "hetero"
    subprocess.run(["git", "clone", "--quiet", str(root), str(target)], check=True)
    return target


def test_no_dead_link_in_readme_report_and_pages(clone: Path) -> None:
    shown = [clone / "README.md", clone / "results" / "report.html"]
    pages = sorted((clone / "results" / "pages").rglob("*.html"))
    assert {page.stem for page in pages} == {"claims", *source.notebooks()}
    assert [link for file in (*shown, *pages) for link in dead(file, clone)] == []


def test_executed_notebooks_are_light_and_show_their_figures(clone: Path) -> None:
    executed = sorted(clone.glob("results/*/*/*.ipynb"))
    assert {path.stem for path in executed} == set(source.notebooks())
    pages = list((clone / "results" / "pages").rglob("*.html"))
    assert sum(path.stat().st_size for path in (*executed, *pages)) < 8_000_000
    for path in executed:
        prose = "\n".join(
            source.text(cell) for cell in source.cells(path) if cell["cell_type"] == "markdown"
        )
        manifest = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))
        saved = {row["file"] for row in manifest["figures"]}
        linked = {name for name in saved if f"]({name})" in prose}
        assert linked == saved, f"{path}: {saved - linked}"


def test_plots_name_columns_that_tables_have(clone: Path) -> None:
    plots = YAML(typ="safe", pure=True).load(clone / "dvc.yaml")["plots"]
    for traces in ("twin", "real"):
        for plot in plots:
            if isinstance(plot, str):
                assert (clone / plot.replace("${workload.source}", traces)).is_file()
                continue
            ((_, drawn),) = plot.items()
            ((file, column),) = drawn["y"].items()
            table = clone / file.replace("${workload.source}", traces)
            head = table.read_text(encoding="utf-8").split("\n", 1)[0].replace('"', "")
            assert column in head, table
            assert drawn["x"] in head, table
