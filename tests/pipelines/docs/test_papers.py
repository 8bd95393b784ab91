"""From an item of a paper to its code, in one search."""

from __future__ import annotations

import ast
import re
from importlib.metadata import distribution

import pytest
import typer
from typer.testing import CliRunner

from hetero import paths
from hetero.apps.cli import command
from pipelines import commands
from pipelines.docs import build, papers

LOOKUPS = {
    "Xiong Algorithm 1": "planners/xiong/estimate.py:throughput",
    "Xiong Algorithm 2": "routers/xiong.py:workload",
    "Xiong eq. 3": "latency/models/affine.py:Affine.prefill_batch_s",
    "Xiong eq. 4": "latency/models/affine.py:Affine.decode_batch_s",
    "Xiong eq. 7": "routers/xiong.py:workload",
    "HeteroServe capability weight": "routers/heteroserve.py:capability_scores",
    "HeteroServe bins": "workload/lengths.py:bins",
    "HeteroServe eq. 4": "routers/heteroserve.py:HeteroServe.admissions",
    "HeteroServe damping": "routers/heteroserve.py:heteroserve",
    "Rignall ranges": "workload/lengths.py:ranges",
    "Rignall inner MILP": "planners/rignall/inner.py:solve",
    "Rignall divider": "planners/rignall/divider.py:divide",
    "Helix MILP": "planners/helix/milp.py:Milp",
    "Helix T_j(k)": "placement/throughput.py:throughput",
    "IWRR": "routers/pipelines.py:by_weight",
    "Helix KV mask": "engine/pipeline_kv.py:room",
    "ThunderServe tabu neighbourhoods": "planners/thunderserve/tabu.py:neighbour",
    "ThunderServe transport": "planners/thunderserve/evaluate.py:transport",
    "ThunderServe KV compression": "costs/transfer.py:KvTransfer",
    "OS": "routers/xiong.py:Workload",
    "MB": "routers/xiong.py:Workload",
}
CITATION = re.compile(
    r"\b(?:[Ss]ections?|[Ee]qs?\.|[Ee]quations?|Algorithms?|Tables?|Figs?\.|Figures?) \(?\d"
    r"|\b[Aa]ppendix [A-Z]\b"
)
# Names of the papers, and keys of data/published such as "helix/Fig. 5".
PAPER = re.compile("|".join(title.split()[0] for title in papers.PAPERS.values()), re.IGNORECASE)


def _places(item):
    return [":".join(place).removeprefix("hetero/") for place in item.places]


@pytest.mark.parametrize("text", list(LOOKUPS))
def test_one_search_leads_to_the_code(text):
    found = papers.find(text)
    assert LOOKUPS[text] in [place for item in found for place in _places(item)]
    assert len(found) <= 4


def test_a_search_takes_beginnings_of_words_and_whole_numbers():
    assert len(papers.find("IWRR")) == 1
    assert papers.find("thunderserve compress") == papers.find("ThunderServe compression")
    assert {item.where for item in papers.find("rignall 4.8.1")} == {"section 4.8.1"}
    assert papers.find("xiong eq. 9") == papers.find("helix 4.8") == ()
    assert papers.find() == papers.items()


def test_the_command_searches_it_and_every_command_of_a_checkout_is_one(said, refused):
    assert "hetero/routers/pipelines.py:by_weight" in said("papers", "IWRR")
    assert "all of the words 'IWRR twice'" in refused("papers", "IWRR", "twice")
    declared = distribution("hetero").entry_points.select(group="hetero.commands")
    assert declared.names <= set(command().commands)


def test_the_committed_page_is_what_the_docstrings_say():
    text = papers.PAGE.read_text(encoding="utf-8")
    assert text == papers.page(), "python -m pipelines.docs.papers writes it"
    assert "](papers.md)" in (papers.PAGE.parent / "reading.md").read_text(encoding="utf-8")


def test_the_site_leads_to_pages_of_the_api(monkeypatch):
    monkeypatch.setattr(build, "api", lambda: {"api/hetero.routers.rotation.md": ""})
    text = build.generated()["papers.md"]
    assert "[`hetero/routers/rotation.py`](api/hetero.routers.rotation.md) `RoundRobin`" in text
    assert "../" not in text


def test_every_line_of_a_source_that_names_a_paper_can_be_read():
    lines = [
        line
        for _, _, text in papers.docstrings()
        for line in text.splitlines()
        if re.match(r" *Sources?: ", line) and PAPER.match(line.split(": ", 1)[1])
    ]
    assert len(lines) > 100
    assert [line for line in lines if not papers.TAG.fullmatch(line)] == []


def test_every_item_stands_once_and_says_where_it_is_or_why_not():
    items = papers.items()
    assert {item.paper for item in items} == set(papers.PAPERS)
    assert len({(item.paper, item.where, item.what) for item in items}) == len(items)
    assert [item for item in items if not (item.places or item.notebooks or item.remark)] == []
    for item in items:
        for file, name in item.places:
            body = ast.parse((paths.root() / file).read_text(encoding="utf-8")).body
            for part in filter(None, name.split(".")):
                body = next(node.body for node in body if getattr(node, "name", "") == part)


def test_every_numbered_equation_and_algorithm_has_code():
    numbered = {"xiong": (8, 2), "heteroserve": (6, 0), "thunderserve": (1, 2)}
    for paper, (equations, algorithms) in numbered.items():
        wanted = {f"eq. {k + 1}" for k in range(equations)}
        wanted |= {f"Algorithm {k + 1}" for k in range(algorithms)}
        assert wanted <= {i.where for i in papers.items() if i.paper == paper and i.places}


def test_who_cites_a_section_or_an_equation_names_its_paper():
    bare = [
        (file, line.strip())
        for file, _, text in papers.docstrings()
        if not papers.TAG.search(text)
        for line in text.splitlines()
        if CITATION.search(line) and not PAPER.search(line)
    ]
    assert bare == []


def test_the_command_prints_the_rows_of_a_word():
    app = typer.Typer()
    app.command()(commands.papers)
    ended = CliRunner().invoke(app, ["IWRR"])
    assert ended.exit_code == 0
    assert "hetero/routers/pipelines.py:by_weight" in ended.stdout
    assert "section 5.2" not in ended.stdout
