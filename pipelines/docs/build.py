"""Build the documentation into ``pipelines/build/site``: ``python -m pipelines.docs``.

Pages are Markdown files in ``pipelines/docs/pages``. What the code already says is made from it
here and never written twice: the glossary, the tables of GPUs, faults and parameters, the list of
commands, the fields of a routing table, and the API.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import hetero
from hetero import paths
from hetero.catalog import serving_engine
from hetero.errors import HeteroError
from pipelines.docs import papers
from pipelines.studies import calibration
from pipelines.studies.coverage import DRAWINGS

PAGES = Path(__file__).parent / "pages"
# Compiled kernels are no API: numba infers their types, and their callers say what they do.
_HIDDEN = ("hetero._", "hetero.apps.cli", "pipelines.bench", "hetero.notebook_engine")
_FITTED = ("overheads", "memory", "offline_compute", "experts", "efficiencies")
# Columns of these files: what a row holds for, errors left out, and constants.
_KEY, _LEFT = "engine|releases|since|gpu|type|grid", r"left_out_\w+|\w+_held_out_llm\w+|error_gib"
_CONSTANT = rf"(?!{_LEFT})\w+_(s|us|share|efficiency|factor|bytes|gib|tokens)"


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
    print("Pages from code and docstrings ...", flush=True)
    for name, text in generated().items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    try:
        from sphinx.cmd.build import build_main
    except ModuleNotFoundError:
        raise HeteroError(
            "Sphinx is not installed.", resolve="run make docs, or install the extra 'docs'."
        ) from None
    shutil.rmtree(folder, ignore_errors=True)
    code = build_main(
        ["-b", builder, "-W", "--keep-going", "-E", "-c", str(Path(__file__).parent), "-d",
         str(source / ".doctrees"), str(source), str(folder)]
    )  # fmt: skip
    if code:
        raise HeteroError(
            "The pages have the warnings above.", resolve="mend the pages or docstrings they name."
        )
    return folder


def generated() -> dict[str, str]:
    """Text of every page that is made from code, by its path."""
    described, beside = api(), paths.root() / "pipelines"

    def link(file: str) -> str:
        """The page of a module, none where it has none; the site is without the checkout."""
        name = f"api/{file.removesuffix('.py').replace('/', '.')}.md"
        return name if name in described else ""

    return {
        "papers.md": papers.page(link),
        "reference/metrics.md": metrics(),
        "reference/gpus.md": gpus(),
        "constants.md": constants(),
        "reference/faults.md": (beside / "FAULTS.md").read_text("utf-8"),
        "reference/parameters.md": (beside / "PARAMETERS.md").read_text("utf-8"),
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


def constants() -> str:
    """Every fitted constant, what it was fitted to, and its error left out."""
    files = {at.stem: at for at in paths.data().glob("*/*.csv")}
    read = {name: pd.read_csv(files[name], dtype=str) for name in _FITTED}
    frame = pd.concat(read, names=["file"]).reset_index("file").query("source != 'assumed'")
    servers, lines = _left_out(), [(PAGES / "constants.md").read_text("utf-8")]
    lines += ["| in data | of | constants | fitted to | error left out |", 5 * "| --- " + "|"]
    for row in frame.to_dict("records"):
        own = {str(name): value for name, value in row.items() if isinstance(value, str)}
        of = " ".join(own[name] for name in own if re.fullmatch(_KEY, name))
        fitted, left = (
            ", ".join(f"{name} {own[name]}" for name in own if re.fullmatch(part, name))
            for part in (_CONSTANT, _LEFT)
        )
        left = left or servers.get(of) or servers.get(of.rpartition(" ")[0], "-")
        lines.append(f"| {own['file']} | {of} | {fitted} | {own['source']} | {left} |")
    return "\n".join([*map(_escaped, lines), ""])


def _left_out() -> dict[str, str]:
    """Errors of servers left out, by the overheads of their release and by GPU."""
    runs = pd.concat(map(calibration.read, ("servers", "expert_servers")))
    runs = runs.query("test in ['gpu', 'llm']")
    words = [one.lower().removeprefix("nm-").split() for one in runs["server"]]
    kinds = [serving_engine(name).overheads_of(release) for name, release in words]
    named = runs.assign(of=[kind.name if kind else "" for kind in kinds])
    runs = runs.assign(of=[words[k][0] + " " + gpu for k, gpu in enumerate(runs["gpu"])])
    runs = pd.concat([named, runs]).set_index(["of", "test"])
    labels = ["TPOT", "E2E", "TTFT"]
    sizes = runs[labels].abs().groupby(level=[0, 1]).median().unstack()
    chips = calibration.read("server_chips").set_index("gpu")["error"].abs().groupby("gpu").median()
    return {gpu: f"throughput {size:.0f} %" for gpu, size in chips.items()} | {
        of: ", ".join(f"{q} {row[q, 'gpu']:.0f} / {row[q, 'llm']:.0f} %" for q in labels)
        for of, row in sizes.iterrows()
    }


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
    """The JSON schema that the exporter writes by, with the meaning of every field."""
    from hetero.apps.export import routing

    schema = json.dumps(routing.schema(), indent=1)
    about = inspect.cleandoc(routing.__doc__ or "").split("\n\n")[0]
    return f"# Routing table\n\n{about}\n\n```json\n{schema}\n```\n"


def api() -> dict[str, str]:
    """A page per module of the library, and their list; pages themselves are in no menu."""
    found = (one.name for one in pkgutil.walk_packages(hetero.__path__, "hetero."))
    public = (name for name in found if not name.startswith(_HIDDEN) and "._" not in name)
    pages, lines = {}, ["# All modules", "", "From the docstrings of the library.", ""]
    for name in ["hetero", *sorted(filter(_documented, public))]:
        pages[f"api/{name}.md"] = (
            f"---\norphan: true\n---\n# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n"
            "   :members:\n   :member-order: bysource\n```\n"
        )
        about = (importlib.import_module(name).__doc__ or "").partition("\n")[0]
        lines.append(f"- [`{name}`]({name}.md): {about}")
    return pages | {"api/index.md": "\n".join([*lines, ""])}


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


def main() -> None:
    """Build the site, and say where it is."""
    print(build() / "index.html")
