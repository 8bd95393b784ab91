"""pyproject.toml declares what the code imports, make setup installs what the pipeline needs."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hetero import paths
from pipelines import dependencies, schema, setup, source

ROOT = paths.root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"hetero", "pipelines", "tests"}
# Declared without an import that can be seen: kernels, plugins, and what others import only if it
# is there.
UNSEEN = {
    "ipykernel",  # the kernel that executes notebooks
    "jax",  # botorch's fully Bayesian model
    "jupyterlab",
    "numpyro",  # as jax
}


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def declared(*extras: str) -> set[str]:
    texts = list(PROJECT["dependencies"])
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return {normal(Requirement(text).name) for text in texts}


@lru_cache(maxsize=1)
def providers() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def distributions(module: str) -> set[str]:
    """What provides a module, as it is installed here."""
    return {normal(name) for name in providers().get(module, [module])}


def top(code: str) -> Iterator[str]:
    """Packages of others that a piece of code imports, anywhere in it."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in {name.partition(".")[0] for name in names}:
            if name not in sys.stdlib_module_names and name not in OWN:
                yield name


def code_of(notebook: str) -> str:
    text = source.code(source.notebook_path(notebook))
    return text.replace("\n%", "\n#").replace("\n!", "\n#")


def files() -> Iterator[tuple[str, str]]:
    for folder in ("hetero", "pipelines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "build" not in path.relative_to(ROOT).parts:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for notebook in source.notebooks():
        yield f"notebooks/{notebook}.ipynb", code_of(notebook)


@lru_cache(maxsize=1)
def imports() -> list[tuple[str, str]]:
    """Every file with each package of others that it imports."""
    return [(file, module) for file, code in files() for module in top(code)]


def test_every_import_is_declared() -> None:
    known = declared(*PROJECT["optional-dependencies"])
    missing = {
        f"{file}: {module}" for file, module in imports() if not distributions(module) & known
    }
    assert not missing, f"add to pyproject.toml: {', '.join(sorted(missing))}"


def test_everything_that_make_setup_installs_by_name_is_imported() -> None:
    used = {name for _, module in imports() for name in distributions(module)}
    idle = declared(*setup.EXTRAS) - used - UNSEEN
    assert not idle, f"take out of pyproject.toml: {', '.join(sorted(idle))}"


def test_the_default_pipeline_imports_nothing_beyond_make_setup() -> None:
    here = declared(*setup.EXTRAS)
    for stage in schema.SECTIONS:
        ran = dependencies.modules(stage)
        # What asks a running server, imported where it is asked for; no stage does.
        outside = {module for file, module in imports() if file in ran} - {"openai"}
        missing = {one for one in outside if not distributions(one) & here}
        assert not missing, f"{stage} needs {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    "path", ["Dockerfile", "binder/postBuild", ".devcontainer/devcontainer.json"]
)
def test_other_places_use_the_same_set_up(path: str) -> None:
    assert "make setup" in Path(ROOT, path).read_text()
