"""The report: verdicts, figures and links, from manifests in a folder of their own."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from hetero import paths
from hetero.plots import figures
from pipelines import report
from pipelines.studies import claims
from pipelines.studies.coverage import figures as published
from pipelines.studies.results import ResultFolder


class Page(HTMLParser):
    """Links, pictures, ids and rows of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.rows: dict[str, str] = {}
        self.tags: set[str] = set()
        self._row = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.links += [value for key in ("href", "src") if (value := found.get(key))]
        if name := found.get("id"):
            self.ids.add(name)
            if tag == "tr":
                self._row = name
                self.rows[name] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self._row = ""

    def handle_data(self, data: str) -> None:
        if self._row:
            self.rows[self._row] += data


def leave(folder: Path, source: str, *, requests: int, profile: str = "smoke", nodes: int = 875):
    """What a run of the first notebook would leave, with chosen values."""
    output = folder / source / "01_workloads"
    out = ResultFolder("01_workloads", str(output), profile, source, seeds=[0, 1])
    drawn, axes = plt.subplots()
    axes.plot([0, 1])
    axes.set(xlabel="requests", ylabel="length [tokens]")
    out.figure(drawn, "lengths", shows=["helix/Fig. 5"], caption="Lengths <of> & both.")
    figures.close(drawn)
    frame = pd.DataFrame({"p [%]": range(40), "x": [1.23456789] * 40})
    out.table(frame, "quantiles", caption="Quantiles.")
    out.claim("helix-21a", requests, figure="lengths", note="after the <filter>")
    out.claim("helix-34c", 190.25, figure="lengths", interval=(180.5, 199.5))
    out.claim("helix-16a", nodes, figure="lengths")
    out.claim("heteroserve-5", 2.0, figure="lengths", interval=(1.9, 2.1))
    out.claim("xiong-1a", "2>4>8>1", figure="quantiles")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    leave(tmp_path, "twin", requests=16_000)
    return tmp_path


def test_verdicts_stand_beside_published_and_measured_values(results: Path) -> None:
    brief, full = map(Page, report.render(results))
    assert set(brief.rows) == set(full.rows) == {claim.id for claim in claims.ledger()}
    row = " ".join(brief.rows["helix-34c"].split())
    assert row.startswith("not a test Memory of eight L4")
    assert row.endswith("helix-34c 192 190 (180 to 200) lengths")
    page = full
    row = " ".join(page.rows["helix-34c"].split())
    assert row.startswith("not a test Memory of eight L4")
    assert "arithmetic: the data-sheet figures" in row
    assert "192 192 190.25" in row
    assert "180.50 to 199.50" in row
    row = " ".join(page.rows["helix-16a"].split())
    assert row.startswith("not reproduced 24-node problem, pruned: variables")
    row = " ".join(page.rows["heteroserve-5"].split())
    assert row.startswith("undecided Throughput over Uniform")
    assert "2 draws, 5 are needed" in row
    assert "1.9000 to 2.1000" in row
    assert row.endswith("2 draws lengths")
    # A claim about the trace itself is not judged by its twin, but the value is shown.
    row = " ".join(page.rows["helix-21a"].split())
    assert row.startswith("not attempted")
    assert "16,000" in row
    assert "after the <filter>" in row
    assert " ".join(page.rows["xiong-1a"].split()).startswith("direction only")
    assert " ".join(page.rows["thunderserve-20"].split()).startswith("not a test")
    assert " ".join(page.rows["thunderserve-26"].split()).startswith("not attempted")


def test_real_traces_decide_once_they_are_there(results: Path) -> None:
    leave(results, "real", requests=16_657)
    text, full = report.render(results)
    row = " ".join(Page(full).rows["helix-21a"].split())
    assert row.startswith("reproduced")
    assert "16,000" in row
    assert " ".join(Page(text).rows["helix-21a"].split()).startswith("reproduced")
    assert text.index('src="twin/01_workloads/lengths.svg"') > 0
    assert text.index('src="real/01_workloads/lengths.svg"') > 0


def test_verdicts_of_the_paper_profile_stand_beside_and_do_not_count(tmp_path: Path) -> None:
    leave(tmp_path, "twin", requests=16_000, profile="default")
    before = claims.verdicts(tmp_path).table()
    # A claim about the trace is not judged by its twin, so that this is no other verdict.
    leave(tmp_path / "paper", "twin", requests=16_657, profile="paper", nodes=876)
    found = claims.verdicts(tmp_path)
    assert found.table() == before
    told = report.profiles_table(tmp_path, found)
    verdicts = ("not reproduced", "reproduced")
    assert told.rows == (("helix-16a", "twin", "876", "875", "876", *verdicts),)
    assert told.notes[0].startswith("1 of 3 claims")
    assert "Run in the paper profile: 01_workloads (twin)." in told.notes[1]
    assert "07_island_outer_loop" in told.notes[1]
    # The real trace is compared with the real one only.
    leave(tmp_path, "real", requests=16_000, profile="default", nodes=876)
    assert report.profiles_table(tmp_path, claims.verdicts(tmp_path)).rows == told.rows
    leave(tmp_path / "paper", "real", requests=16_657, profile="paper", nodes=876)
    told = report.profiles_table(tmp_path, claims.verdicts(tmp_path))
    assert [row[:2] for row in told.rows] == [("helix-16a", "twin"), ("helix-21a", "real")]
    text = report.render(tmp_path)[0]
    assert "#helix-21a" in Page(text).links
    text = text[text.index('<section id="01_workloads"') :]
    shown = [f'src="{at}/01_workloads/lengths.svg"' for at in ("paper/twin", "paper/real", "twin")]
    assert 0 < text.index(shown[0]) < text.index(shown[1]) < text.index(shown[2])
    # A run of other code than the default one is named, not compared.
    manifest = tmp_path / "paper" / "real" / "01_workloads" / "manifest.json"
    run = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps(run | {"code_sha256": "another"}), encoding="utf-8")
    told = report.profiles_table(tmp_path, claims.verdicts(tmp_path))
    assert [row[0] for row in told.rows] == ["helix-16a"]
    assert "01_workloads (real, of other code)" in told.notes[1]
    text = report.render(tmp_path)[0]
    assert shown[0] in text
    assert shown[1] not in text


def test_every_link_leads_somewhere(results: Path) -> None:
    texts = dict(zip(("report.html", "pages/claims.html"), report.render(results), strict=True))
    found = {(results / name).resolve(): Page(text) for name, text in texts.items()}
    for path, page in found.items():
        for link in page.links:
            if link == "data:,":
                continue
            assert "//" not in link, "the page needs no network"
            file, _, name = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if target in found:
                assert not name or name in found[target].ids, link
            elif target.is_relative_to(results):
                assert target.is_file(), link
            else:
                assert file.startswith("../"), link
                assert (paths.root() / file[3:]).exists(), link


def test_numbers_are_written_to_their_precision(results: Path) -> None:
    brief, full = report.render(results)
    for text in (brief, full):
        shown = re.sub(r"<style.*?</style>|<script.*?</script>|<[^>]+>", " ", text, flags=re.S)
        assert re.findall(r"(?<![\w./-])\d+\.\d{6,}", shown) == []


def test_the_report_is_no_longer_than_can_be_read() -> None:
    text = (paths.results() / "report.html").read_text(encoding="utf-8")
    shown = re.sub(r"<style.*?</style>|<script.*?</script>|<[^>]+>", " ", text, flags=re.S)
    assert 10_000 < len(shown.split()) <= 20_000


def test_the_caption_of_a_pair_is_said_once_and_hidden_with_neither(results: Path) -> None:
    leave(results, "real", requests=16_657)
    text, _ = report.render(results)
    start = text.index('<section id="01_workloads"')
    chapter = text[start : text.index("</section>", start)]
    assert chapter.count('<p class="caption">Lengths &lt;of&gt; &amp; both.') == 1
    assert "<figcaption><small>real</small>" in chapter
    assert chapter.count("Helix, Fig. 5") == 1
    assert chapter.count("smoke profile; seeds 0, 1;") == 1


def test_the_first_screen_has_the_tables_it_names() -> None:
    shown = list(report.panels(paths.results()))
    assert len(shown) == len(report._PANELS)
    for panel in shown:
        assert panel["rows"]
        assert all(len(row) == len(panel["head"]) for row in panel["rows"])


def test_every_paper_has_its_values_and_its_figures(results: Path) -> None:
    text, _ = report.render(results)
    page = Page(text)
    for paper in ("xiong", "heteroserve", "rignall", "helix", "thunderserve"):
        assert f"paper-{paper}" in page.ids
    start = text.index('id="paper-helix"')
    helix = text[start : text.index("</section>", start)]
    assert 'id="helix-34c"' in helix
    assert 'href="#twin/01_workloads/lengths.svg"' in helix
    assert 'href="#01_workloads"' in helix
    assert "../pipelines/docs/figures/helix-fig-3.svg" in helix
    assert "not yet: 09_helix_serving" in helix
    # Every published item stands in the section of its paper, once.
    items = [line for line in helix.splitlines() if line.startswith("<td><b>")]
    assert len(items) == sum(figure.paper == "helix" for figure in published())


def test_every_figure_and_table_stands_with_its_notebook(results: Path) -> None:
    text, _ = report.render(results)
    start = text.index('<section id="01_workloads"')
    chapter = text[start : text.index("</section>", start)]
    assert 'href="../notebooks/01_workloads.ipynb"' in chapter
    assert 'href="../pipelines/fingerprints/01_workloads"' in chapter
    assert '<figure id="twin/01_workloads/lengths.svg"' in chapter
    assert 'href="twin/01_workloads/quantiles.csv"' in chapter
    assert "40 rows" in chapter


def test_same_results_same_page(results: Path) -> None:
    assert report.render(results) == report.render(results)


def test_page_without_any_results(tmp_path: Path) -> None:
    page = Page(report.render(tmp_path)[0])
    for row in page.rows.values():
        assert row.strip().startswith(("not attempted", "not a test"))
