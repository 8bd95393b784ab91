from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
import shlex

import pytest
import typer.main

import hetero
from hetero import cluster, paths
from hetero.apps import cli
from hetero.apps.export import routing
from hetero.apps.serving import settings
from hetero.latency import storage
from hetero.latency.step import StepModel
from pipelines.docs import believed, build
from pipelines.docs.build import PAGES as PAGES_FOLDER
from pipelines.studies.coverage import DRAWINGS
from pipelines.sweep import spec
from tests.hetero.apps.cards.quick_cards import little


def test_every_drawing_is_shown():
    shown = re.findall(r"\(\.\./figures/(.+)\)", (PAGES_FOLDER / "diagrams.md").read_text("utf-8"))
    assert sorted(shown) == sorted(path.name for path in (paths.root() / DRAWINGS).iterdir())


# ---- every block of code on the pages --------------------------------------------------------

PAGES = sorted(PAGES_FOLDER.rglob("*.md"))
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str):
    """Blocks of the pages in some languages, with the name of their page."""
    return [
        pytest.param(text, id=f"{page.relative_to(PAGES_FOLDER)}-{k}")
        for page in PAGES
        for k, (language, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
        if language in languages
    ]


def test_every_public_name_stands_on_the_page_of_the_api():
    text = (PAGES_FOLDER / "api.md").read_text("utf-8")
    assert [name for name in hetero.LAZY if f":: hetero.{name}\n" not in text] == []


def test_every_block_is_of_a_kind_that_is_tested():
    kinds = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text("utf-8"))}
    assert kinds == {"python", "sh", "yaml", "{toctree}", "{eval-rst}"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PAGES_FOLDER)))
def test_examples_give_what_they_say(page, monkeypatch):
    little(monkeypatch)
    text = page.read_text(encoding="utf-8")
    # What is no prompt and no answer to one would not be run.
    for kind, code in BLOCK.findall(text):
        assert kind != "python" or code.startswith(">>> ")
    found = doctest.testfile(str(page), module_relative=False)
    assert found.failed == 0
    assert found.attempted >= text.count("\n>>> ")


@pytest.fixture(scope="module")
def group():
    return cli.command()


def parsed(group, words):
    """Parse a command as the shell would, without running it."""
    command, name = group, "hetero"
    while hasattr(command, "commands"):
        context = command.make_context(name, list(words))
        name, command, words = command.resolve_command(context, context._protected_args)
        words = [*words, *context.args]
    return command.make_context(name, list(words))


@pytest.mark.parametrize("text", blocks("sh"))
def test_commands_are_ones_that_exist(text, group):
    for line in text.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True)
        if program in ("python", "curl"):
            assert program == "curl" or importlib.util.find_spec(words[1]), line
        elif program == "make":
            targets = re.findall(r"^(\w+):", (paths.root() / "Makefile").read_text(), re.MULTILINE)
            assert words[0] in targets
        elif program == "dvc":
            dvc = pytest.importorskip("dvc.cli", reason="the extra 'pipeline' is not installed")
            assert dvc.parse_args(words)
        else:
            assert program == "hetero", line
            assert parsed(group, words).params


@pytest.mark.parametrize(
    "line", ["plan fleet.yaml --model M --nonsense", "trace paint x", "size --rate fast", "fit"]
)
def test_commands_that_do_not_exist_would_be_noticed(line, group):
    with pytest.raises(typer.TyperException):
        parsed(group, line.split())


@pytest.mark.parametrize("text", blocks("yaml"))
def test_files_are_accepted_by_their_readers(text, tmp_path):
    kind, _, name = text.splitlines()[0].removeprefix("# a ").partition(" file: ")
    path = tmp_path / name
    path.write_text(text)
    if kind == "cluster":
        assert cluster.find(str(path)).machines
    elif kind == "deployment":
        step = StepModel.affine(floor_s=0.01, per_token_s=1e-5, per_cached_token_s=1e-8)
        for wanted in set(re.findall(r"step: (\w+\.json)", text)):
            storage.save(step, tmp_path / wanted)
        assert settings.load(path).deployment().replicas
    else:
        assert kind == "sweep"
        assert spec.points(spec.read(path))


# ---- pages made from the code ----------------------------------------------------------------


def test_the_glossary_is_that_of_the_metrics():
    text = build.metrics()
    source = inspect.getdoc(importlib.import_module("hetero.simulator.metrics"))
    terms = re.findall(r"^(\w[\w /-]*)\n    ", source, re.MULTILINE)
    assert {"TTFT", "TPOT", "Requests within targets"} <= set(terms)
    for term in terms:
        assert f"\n{term}\n: " in text
    assert text.count("\n: ") == len(terms)


def test_every_command_is_listed(group):
    text = build.commands()
    for name, command in group.commands.items():
        for leaf in getattr(command, "commands", None) or [""]:
            assert f"## hetero {name} {leaf}".strip() in text
    assert "`--memory`" in text


def test_the_fields_of_a_routing_table_are_documented():
    text = build.routing_table()
    for name, field in routing.RoutingTable.model_fields.items():
        assert f'"{name}": {{' in text
        assert field.description is None or field.description in text
    assert "hetero routing table 1" in text


def test_links_between_pages_lead_somewhere():
    made = {"reference/metrics.md", "reference/gpus.md", "reference/faults.md", "api/index.md"}
    made |= {"reference/commands.md", "reference/parameters.md", "reference/routing-table.md"}
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            made_here = [(PAGES_FOLDER / name).resolve() for name in made]
            assert target in made_here or target.is_file(), link


def test_the_reading_guide_names_every_folder_and_only_what_is_there():
    text = (PAGES_FOLDER / "reading.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:hetero|pipelines|data)/[\w/.]+)`", text)
    assert len(named) > 40
    assert [one for one in named if not (paths.root() / one).exists()] == []
    folders = [
        folder.relative_to(paths.root()).as_posix()
        for above in ("hetero", "hetero/apps", "pipelines")
        for folder in (paths.root() / above).iterdir()
        if (folder / "__init__.py").is_file()
    ]
    assert [one for one in folders if one != "hetero/apps" and f"`{one}/`" not in text] == []


def test_every_example_of_the_readme_gives_what_it_says(monkeypatch):
    little(monkeypatch)
    found = doctest.testfile(str(paths.root() / "README.md"), module_relative=False)
    assert found.attempted > 5
    assert found.failed == 0


def test_the_readme_says_what_the_measurements_say():
    text = (paths.root() / "README.md").read_text(encoding="utf-8")
    assert believed.readme() == text, "python -m pipelines.docs.believed writes it"
    assert len(text.splitlines()) <= 150
