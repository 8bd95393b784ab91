"""Run one stage: one notebook, with the parameters of params.yaml, into its results folder.

``python -m pipelines.run workloads`` executes ``notebooks/01_workloads.ipynb`` and leaves
``results/<source>/01_workloads/``: figures, tables, manifest.json and the executed notebook.
Earlier results are replaced only by a complete new set.

With ``--paper`` it runs in the paper profile, whatever params.yaml says, and all but the executed
notebook is kept, in ``results/paper/<source>/01_workloads/``. All other results stay as they are,
and the report shows both and compares the verdicts.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero import paths
from hetero.errors import DataError, HeteroError, ParameterError
from hetero.files import move, parse_yaml, sync
from pipelines import dependencies, environment, schema, source

#: What the runner itself sets in every notebook, beside the parameters of its section.
GIVEN = ("output", "profile", "source")


log = logging.getLogger("hetero.notebook")


class StageError(HeteroError):
    """A notebook that did not run to its end, or left something other than complete results."""


def run(stage: str, *, traces: str | None = None, paper: bool = False) -> Path:
    """Run the notebook of ``stage`` and return its results folder.

    Parameters
    ----------
    stage
        Section of params.yaml, such as ``"workloads"``.
    traces
        ``twin`` or ``real``, instead of ``workload.source`` of params.yaml.
    paper
        Run in the paper profile, apart from the results of others, and keep no notebook.

    Raises
    ------
    StageError
        If a cell fails, or the code changed while it ran. Earlier results are untouched.
    """
    params = schema.load(source=traces, profile=schema.PAPER if paper else None)
    notebook = source.notebook_of(stage)
    path = source.notebook_path(notebook)
    values = params.of(stage)
    check_names(path, stage, values)
    check_effect(stage, params)
    root = paths.root()
    if not dependencies.current(stage):
        raise StageError(
            f"{dependencies.file(stage).relative_to(root)} is not what {path.name} and the modules "
            "it imports are now.",
            resolve="run `hetero repro`, or `python -m pipelines.dependencies` first.",
        )
    before = dependencies.state(stage)

    place = Path(schema.PAPER if paper else "") / params.source / notebook
    folder = root / "results" / place
    build = root / "pipelines" / "build"
    work = build / "run" / place
    shutil.rmtree(work, ignore_errors=True)
    if work.with_suffix(".old").is_dir() and not folder.exists():
        work.with_suffix(".old").rename(folder)  # a run was killed between the two renames
    work.mkdir(parents=True)
    given = {
        "output": str(work.relative_to(root)),
        "profile": params.profile,
        "source": params.source,
    }
    try:
        executed = execute(path, given | values, failed=build / f"{notebook}.failed.ipynb")
        after = dependencies.state(stage)
        if changed := sorted({name for name, _ in before.items() ^ after.items()}):
            raise StageError(
                f"{', '.join(changed)} changed while stage '{stage}' ran, so its results would "
                "not belong to the code beside them; earlier results are kept.",
                resolve="run it again.",
            )
        _complete(work, notebook, values)
        # The notebook wrote to a working folder; whoever opens it should find the final one.
        text = executed.replace(given["output"], str(folder.relative_to(root)))
        text = text.replace(f"{root}/", "")
        if not paper:
            (work / path.name).write_text(text, encoding="utf-8")
        _swap(work, folder)
        ran = build / "ran" / place
        ran.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(dependencies.file(stage), ran)  # `hetero status` names what changed since
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def check_names(path: Path, stage: str, values: Mapping[str, Any]) -> None:
    """Compare the parameters cell with the section: papermill only warns of a name it lacks."""
    found = parameter_names(path)
    wanted = [*GIVEN, *values]
    for name in wanted:
        if name not in found:
            close = schema.near(name, found)
            raise ParameterError(
                f"{path.name} has no parameter '{name}', which section '{stage}' of params.yaml "
                "sets.",
                resolve=f"name it as in the parameters cell of the notebook{close}.",
            )
    for name in found:
        if name not in wanted:
            raise ParameterError(
                f"{path.name} has a parameter '{name}' that section '{stage}' of params.yaml does "
                "not set, so its small default would stand in the results.",
                resolve=f"add '{name}' to the section, here and in pipelines/sections.py.",
            )


def check_effect(stage: str, params: schema.Params) -> None:
    """Refuse a change to a value that the profile replaces, and say which of a stage it does.

    A change is one against the last commit, as ``dvc exp run -S`` makes it. All sections are
    looked at, so that an experiment ends before its first stage and not after hours.
    """
    profile, before = params.profile, _committed()
    for section, overlaid in params.overlaid.items():
        for name, value in overlaid.items():
            if before.get(section, {}).get(name, value) != value:
                raise ParameterError(
                    f"{profile} profile: {name} is {params.of(section)[name]}; {section}.{name}, "
                    f"changed to {value}, has no effect.",
                    resolve=f"set {section}.{profile}.{name}, or choose another profile; `git "
                    "checkout params.yaml` takes the change back.",
                )
    if own := params.overlaid.get(stage):
        log.info(
            f"{profile} profile: {', '.join(own)} come from {stage}.{profile}; values above it "
            "have no effect"
        )


def _committed() -> Mapping[str, Any]:
    """The parameters as in the last commit; empty where git does not say."""
    command = ["git", "-C", str(paths.root()), "show", "HEAD:./params.yaml"]
    try:
        text = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        return dict(parse_yaml(text, Path("params.yaml of the last commit")))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, DataError):
        return {}


def parameter_names(path: Path) -> list[str]:
    """Names assigned in the cell tagged ``parameters``.

    Read as Python: papermill's own inspection skips a line whose comment holds a ``=``.

    Raises
    ------
    DataError
        If the notebook has no such cell.
    """
    for cell in source.cells(path):
        if "parameters" in source.tags(cell):
            return [
                target.id
                for line in _python(source.text(cell), path).body
                if isinstance(line, ast.Assign | ast.AnnAssign)
                for target in (line.targets if isinstance(line, ast.Assign) else [line.target])
                if isinstance(target, ast.Name)
            ]
    raise DataError(
        "The notebook has no cell tagged 'parameters'.",
        path=path,
        resolve="tag its second cell 'parameters'.",
    )


def _python(text: str, path: Path) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"The cell tagged 'parameters' is no Python ({error}).",
            path=path,
            resolve="mend it: one `name: type = value` per line.",
        ) from None


def execute(path: Path, parameters: Mapping[str, Any], *, failed: Path) -> str:
    """Text of the notebook executed with the parameters, the same bytes in every run.

    Parameters
    ----------
    failed
        Where the notebook is left, as far as it came, if one of its cells fails.

    Raises
    ------
    StageError
        If a cell raises; the text quotes the cell and the error.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    failed.parent.mkdir(parents=True, exist_ok=True)
    with _environment():
        try:
            papermill.execute_notebook(
                _literal(path),
                _literal(failed),
                parameters=dict(parameters),
                engine_name="hetero",
                kernel_name="python3",
                language="python",
                progress_bar=False,
                request_save_on_cell_execute=False,
                start_timeout=600,  # of the kernel; a busy machine takes minutes
                cwd=paths.root(),
            )
        except PapermillExecutionError as error:
            # An error of our own already says what to do about it.
            said, _, resolve = error.evalue.partition(" Resolve: ")
            root = paths.root()
            where = failed.relative_to(root) if failed.is_relative_to(root) else failed
            raise StageError(
                f"{path.name} failed in cell [{error.exec_count}]: {error.ename}: {said}\n"
                f"{_quote(error)}\nEarlier results are kept; {where} shows how far it came.",
                resolve=resolve or "mend the cell, or its parameters in params.yaml.",
            ) from None
        except DeadKernelError:
            raise StageError(
                f"The kernel of {path.name} died; earlier results are kept.",
                resolve="look for a lack of memory, or for a crash in a compiled library.",
            ) from None
    text = failed.read_text(encoding="utf-8")
    failed.unlink()
    return text


def _literal(path: Path) -> str:
    # Papermill formats paths with the parameters, so braces in a folder's name need escaping.
    return str(path).replace("{", "{{").replace("}", "}}")


@contextmanager
def _environment() -> Iterator[None]:
    """Environment of the kernel for the time of a run; the user's own IPython stays outside."""
    with tempfile.TemporaryDirectory(prefix="hetero-") as folder:
        wanted = environment.stage() | {"IPYTHONDIR": folder, "PYTHONPATH": str(paths.root())}
        with environment.applied(wanted):
            yield


def _quote(error: Any) -> str:
    """The lines of a cell around the one that failed."""
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in error.traceback]
    hit = re.search(r"Cell In\[\d+\], line (\d+)", "\n".join(plain))
    lines = error.source.rstrip().split("\n")
    at = min(int(hit.group(1)), len(lines)) if hit else len(lines)
    shown = [
        f"  {'>' if number == at else ' '} {number:3d} | {lines[number - 1]}"
        for number in range(max(1, at - 4), min(len(lines), at + 1) + 1)
    ]
    return "\n".join(shown)


def _complete(work: Path, notebook: str, values: Mapping[str, Any]) -> None:
    """Check that everything the manifest names is there, and add what produced it."""
    from pipelines.studies.results import MANIFEST

    path = work / MANIFEST
    if not path.is_file():
        raise StageError(
            f"{notebook} left no {MANIFEST}; earlier results are kept.",
            resolve="save its figures, tables and claims through a ResultFolder "
            "(pipelines.studies.results).",
        )
    manifest = json.loads(path.read_text(encoding="utf-8"))
    named = [row["file"] for kind in ("figures", "tables") for row in manifest[kind]]
    lost = [name for name in named if not (work / name).is_file()]
    if lost:
        raise StageError(
            f"{notebook} names {', '.join(lost)} in its {MANIFEST} but did not write it; earlier "
            "results are kept.",
            resolve="save it through pipelines.studies.results.ResultFolder.",
        )
    manifest["parameters"] = dict(values)
    manifest["code_sha256"] = source.fingerprint(source.notebook_path(notebook))
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _swap(work: Path, folder: Path) -> None:
    """Put the new results where the old ones were; on the same disk these are renames."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = work.with_suffix(".old")
    sync(work)  # here, so that little time passes between the renames
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    move(work, folder)
    shutil.rmtree(old, ignore_errors=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the stage named on the command line; a failure is one message and exit 1."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.run", description=__doc__)
    parser.add_argument("stage", help="section of params.yaml, such as workloads")
    parser.add_argument("--source", help="twin or real, instead of workload.source")
    parser.add_argument("--paper", action="store_true", help="paper profile, kept apart")
    options = parser.parse_args(arguments)
    progress = logging.getLogger("hetero.notebook")
    progress.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("  %(message)s"))
    progress.addHandler(handler)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        run(options.stage, traces=options.source, paper=options.paper)
    except HeteroError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped; earlier results are kept.")


if __name__ == "__main__":
    main()
