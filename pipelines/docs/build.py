"""Build the documentation into ``pipelines/build/site``: ``python -m pipelines.docs``.

Pages are Markdown files in ``pipelines/docs/pages``. What the code already says is made from it
here and never written twice: the glossary, the tables of GPUs, faults and parameters, the list of
commands, the fields of a routing table, and the API.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hetero
from hetero import paths
from hetero.errors import HeteroError
from pipelines.docs import papers
from pipelines.studies.coverage import DRAWINGS

PAGES = Path(__file__).parent / "pages"
# Compiled kernels are no API: numba infers their types, and their callers say what they do.
_HIDDEN = ("hetero._", "hetero.apps.cli", "pipelines.bench", "hetero.notebook_engine")


def build(output: Path | None = None, *, builder: str = "html") -> Path:
    """Write the site, and return its folder.

    Parameters
    ----------
    builder
        Of Sphinx; ``"dummy"`` reads every page and docstring, and writes nothing.

    Raises
    ------
    HeteroError
        If a page has a warning of any kind, such as a link that leads nowhere.
    """
    folder = output or paths.root() / "pipelines" / "build" / "site"
    source = folder.with_name(f"{folder.name}-source")
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(PAGES, source)
    shutil.copytree(paths.root() / DRAWINGS, source / "figures")
    for name, text in generated().items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    try:
        from sphinx.cmd.build import build_main
    except ModuleNotFoundError:
        raise HeteroError(
            "Sphinx, which builds the pages, is not installed.",
            resolve="run make docs, or install the extra 'docs'.",
        ) from None
    shutil.rmtree(folder, ignore_errors=True)
    code = build_main(
        ["-b", builder, "-W", "--keep-going", "-q", "-E", "-c", str(Path(__file__).parent), "-d",
         str(source / ".doctrees"), str(source), str(folder)]
    )  # fmt: skip
    if code:
        raise HeteroError(
            "The pages have the warnings above.", resolve="mend the pages or docstrings they name."
        )
    return folder


def generated() -> dict[str, str]:
    """Text of every page that is made from code, by its path."""
    described = api()

    def link(file: str) -> str:
        """The page of a module, none where it has none; the site is without the checkout."""
        name = f"api/{file.removesuffix('.py').replace('/', '.')}.md"
        return name if name in described else ""

    return {
        "papers.md": papers.page(link),
        "reference/metrics.md": metrics(),
        "reference/gpus.md": gpus(),
        "reference/faults.md": copied("FAULTS.md"),
        "reference/parameters.md": copied("PARAMETERS.md"),
        "reference/commands.md": commands(),
        "reference/routing-table.md": routing_table(),
        # The drawings lie beside the pages here, and among them on the site.
        "diagrams.md": (PAGES / "diagrams.md").read_text("utf-8").replace("(../", "("),
        **described,
    }


def metrics() -> str:
    """The glossary of :mod:`hetero.simulator.metrics` as a definition list."""
    module = importlib.import_module("hetero.simulator.metrics")
    _, _, body = inspect.cleandoc(module.__doc__ or "").partition("Glossary\n--------\n")
    lines = ["# Metrics", "", "One definition each, used by every table, figure and claim.", ""]
    for line in body.splitlines():
        if line.startswith("    "):
            lines += [f": {line.strip()}", ""]
        elif line.strip():
            lines.append(line.strip())
    return "\n".join(lines)


def gpus() -> str:
    """What is known of each GPU, as ``hetero gpus`` prints it."""
    from hetero.latency.calibration import known

    return (
        "# What is known of each GPU\n\n"
        "Measured, derived, estimated or assumed: where step times come from, and what error to "
        f"expect of them. `hetero gpus` prints the same.\n\n{known.markdown()}"
    )


def copied(name: str) -> str:
    """A page that lies beside the pipeline."""
    return (paths.root() / "pipelines" / name).read_text(encoding="utf-8")


def commands() -> str:
    """Every command with its first sentence and its options."""
    from hetero.apps import cli

    group = cli.command()
    lines = ["# Commands", "", "Each says the same with `--help`.", ""]
    for name, command in sorted(_leaves(group, "hetero")):
        lines += [f"## {name}", "", *_help(command), ""]
        for parameter in command.params:
            if getattr(parameter, "hidden", False) or parameter.name == "help":
                continue
            flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                flags = f"`{(parameter.metavar or parameter.name or '').upper()}`"
            said = " ".join((getattr(parameter, "help", None) or "").split())
            lines.append(f"- {flags}" + (f": {_escaped(said)}" if said else ""))
        lines.append("")
    return "\n".join(lines)


def routing_table() -> str:
    """Fields of a routing table, from the schema that the exporter writes by."""
    from hetero.apps.export import routing

    schema = routing.schema()
    lines = ["# Routing table", "", _paragraph(routing.__doc__), ""]
    for name, part in [("RoutingTable", schema), *schema["$defs"].items()]:
        lines += [f"## {name}", "", _paragraph(part.get("description")), ""]
        lines += ["| field | type | meaning |", "| --- | --- | --- |"]
        required = part.get("required", [])
        for field, form in part["properties"].items():
            must = "" if field in required else " (may be left out)"
            said = form.get("description", "")
            lines.append(f"| `{field}` | {_type(form)}{must} | {said} |")
        lines.append("")
    return "\n".join(lines)


def api() -> dict[str, str]:
    """A page per package or module of the library, and their list."""
    pages = {}
    found = (one.name for one in pkgutil.walk_packages(hetero.__path__, "hetero."))
    public = (name for name in found if not name.startswith(_HIDDEN) and "._" not in name)
    names = ["hetero", *sorted(filter(_documented, public))]
    for name in names:
        pages[f"api/{name}.md"] = "\n".join(
            [
                f"# {name}",
                "",
                "```{eval-rst}",
                f".. automodule:: {name}",
                "   :members:",
                "   :member-order: bysource",
                "```",
                "",
            ]
        )
    lines = ["# API", "", "From the docstrings of the library.", "", "```{toctree}", ":maxdepth: 1"]
    pages["api/index.md"] = "\n".join([*lines, "", *names, "```", ""])
    return pages


def _documented(name: str) -> bool:
    """Whether a module has classes or functions of its own that are not compiled."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:  # of an extra that is not installed
        return False
    shown = (value for key, value in vars(module).items() if key[0] != "_")
    own = [value for value in shown if getattr(value, "__module__", "") == name]
    return any(inspect.isclass(value) or inspect.isfunction(value) for value in own)


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if not below:
        yield name, command
        return
    for key, one in below.items():
        yield from _leaves(one, f"{name} {key}")


def _help(command: Any) -> list[str]:
    text = inspect.cleandoc(getattr(command, "help", None) or "")
    lines, code = [], False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented and not code:
            lines.append("```text")
        if code and not indented and line.strip():
            lines.append("```")
        code = indented or (code and not line.strip())
        lines.append(line[4:] if indented else _escaped(line))
    return [*lines, "```"] if code else lines


def _escaped(text: str) -> str:
    """Text of a help message as Markdown: brackets and stars as they are."""
    return re.sub(r"([\[\]*<>])", r"\\\1", text)


def _paragraph(text: str | None) -> str:
    first = re.sub(r":\w+:`([^`]*)`", r"`\1`", inspect.cleandoc(text or "").split("\n\n")[0])
    return " ".join(first.replace("``", "`").split())


def _type(form: dict[str, object]) -> str:
    options = form.get("anyOf")
    if isinstance(options, list):
        return " or ".join(_type(one) for one in options)
    if "$ref" in form:
        return str(form["$ref"]).rpartition("/")[2]
    if form.get("type") == "array":
        items = form.get("items")
        return f"list of {_type(items)}" if isinstance(items, dict) else "list"
    if "const" in form:
        return f"`{form['const']}`"
    if "enum" in form:
        allowed = form["enum"]
        assert isinstance(allowed, list)
        return " or ".join(f"`{one}`" for one in allowed)
    return str(form.get("type", "any"))


def main() -> None:
    """Build the site, and say where it is."""
    print(build() / "index.html")
