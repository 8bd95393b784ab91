"""Bring every result up to date: ``hetero repro``, or ``python -m pipelines.repro``.

The parameters are checked first; then ``dvc repro`` runs what is stale, and a short summary says
what ran, what the claims came to, and where to look.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ruamel.yaml import YAML

from hetero import paths
from hetero.errors import HeteroError
from hetero.files import writing
from pipelines import guard, process_lock, run, schema, sections, source


@dataclass(slots=True)
class Progress:
    """What ``dvc repro`` reported so far, by stage."""

    ran: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: str = ""
    reason: str = ""
    locked: bool = False
    blocker: str = ""


def repro(*, profile: str | None = None, traces: str | None = None) -> Progress:
    """Run every stale stage and print what happens.

    Parameters
    ----------
    profile, traces
        Written to params.yaml first, where they differ from it.

    Raises
    ------
    StageError
        If a stage failed; results of the stages before it are new, all others as they were.
    HeteroError
        If another ``hetero repro`` or DVC command works in this checkout.
    """
    root = paths.root()
    if {"{", "}"} & set(str(root)):
        raise HeteroError(
            f"DVC cannot work in a folder with braces in its path ({root}).",
            resolve="move the checkout.",
        )
    with process_lock.held(root / "pipelines" / "build" / "repro.lock", "hetero repro") as lock:
        return _repro(root, lock, profile=profile, traces=traces)


def _repro(root: Path, lock: int, *, profile: str | None, traces: str | None) -> Progress:
    _say(choose(root / "params.yaml", profile=profile, traces=traces))
    params = schema.load()
    for stage in sections.SECTIONS:
        run.check_names(source.notebook_path(source.notebook_of(stage)), stage, params.of(stage))
        run.check_effect(stage, params)
    _say([f"{params.source} traces, {params.profile} profile"])
    if params.profile == schema.PAPER:
        from pipelines.studies import island_outer_loop, league  # takes seconds to import

        _say([island_outer_loop.forecast(params.of("island_outer_loop"))])
        _say([league.forecast(params.of("arena"))])
    progress = Progress()
    environment = {
        # Stages say `python`: it is to be the one that runs this, whatever is activated.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(root),
        "PYTHONUNBUFFERED": "1",
        "DVC_NO_ANALYTICS": "1",
    }
    (root / "results" / "paper").mkdir(parents=True, exist_ok=True)  # the report depends on it
    _release(root / ".dvc" / "tmp" / "rwlock")
    command = [sys.executable, "-m", "dvc", "repro"]
    # The lock is kept until the last of the children is gone, though this process be killed.
    with guard.ended_with_block(patience_s=2.0, keep=[lock]):
        process = subprocess.Popen(
            command,
            cwd=root,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        with process.stdout as lines:
            _say(readable(lines, progress))
        code = process.wait()
    if progress.locked:
        raise HeteroError(
            f"Another DVC command works in this checkout{progress.blocker}; earlier results are "
            "as they were.",
            resolve="wait until it ends, then run `hetero repro` again.",
        )
    if code:
        where = f"Stage {progress.failed}" if progress.failed else "DVC"
        reason = f" ({progress.reason})" if progress.reason else ""
        raise run.StageError(
            f"{where} failed{reason}; its earlier results are as they were.",
            resolve="mend what is said above, then run `hetero repro` again.",
        )
    _say(summary(progress))
    return progress


def _release(path: Path) -> None:
    """Drop from DVC's locks those of processes that are gone.

    DVC does so itself unless another process has their number now, as after a restart.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        write = {k: v for k, v in found["write"].items() if _is_dvc(v["pid"])}
        read = {k: [v for v in all_ if _is_dvc(v["pid"])] for k, all_ in found["read"].items()}
        kept = {"write": write, "read": {k: v for k, v in read.items() if v}}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # none was ever held, or DVC itself says what is wrong with it
    if kept != {"write": found["write"], "read": found["read"]}:
        with writing(path, force=True) as part:
            part.write_text(json.dumps(kept), encoding="utf-8")


def _is_dvc(pid: int) -> bool:
    try:
        return any("dvc" in part for part in psutil.Process(pid).cmdline())
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def choose(path: Path, *, profile: str | None, traces: str | None) -> Iterator[str]:
    """Write the profile and the source of the traces to params.yaml, and say what changed."""
    text = path.read_text(encoding="utf-8")
    schema.parse(text, path)
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width, yaml.preserve_quotes = 4096, True  # a line that is not changed stays as it is
    values = yaml.load(text)
    changes = []
    for holder, key, name, wanted in (
        (values, "profile", "profile", profile),
        (values["workload"], "source", "workload.source", traces),
    ):
        if wanted is not None and holder[key] != wanted:
            changes.append(f"params.yaml: {name} {holder[key]} -> {wanted}")
            holder[key] = wanted
    if changes:
        stream = io.StringIO()
        yaml.dump(values, stream)
        schema.parse(stream.getvalue(), path)
        with writing(path, force=True) as part:
            part.write_text(stream.getvalue(), encoding="utf-8")
    yield from changes


# Nobody asks after the stage that writes the lists of modules.
_RUNNING = re.compile(r"^Running stage '(?!fingerprints')(?P<stage>[^']+)'")
_SKIPPED = re.compile(r"^Stage '(?!fingerprints')(?P<stage>[^']+)' didn't change, skipping")
_FAILED = re.compile(r"^ERROR: failed to reproduce '(?P<stage>[^']+)'(: )?(?P<reason>.*)")
_LOCKED = re.compile(r"^ERROR: .*(is busy, it is being blocked by:|Unable to acquire lock)")
_BLOCKER = re.compile(r"^ +\(PID (?P<pid>\d+)\): (?P<command>.*)")
# What DVC says for those who call it by hand.
_NOISE = re.compile(
    r"^(> |\s*$|Generating lock file|Updating lock file|To track the changes|\tgit add|"
    r"To enable auto staging|\tdvc config|Use `dvc push`|Data and pipelines are up to date|"
    r"Verifying data sources|Running stage 'fingerprints'|Stage 'fingerprints' didn't)"
)


def readable(lines: Iterable[str], progress: Progress) -> Iterator[str]:
    """What a person wants to see of DVC's output; the rest is counted in ``progress``."""
    for line in lines:
        line = line.rstrip("\n")
        if _LOCKED.match(line):
            progress.locked = True
        elif progress.locked:
            # What follows is who holds the lock, and advice to remove it by hand.
            if hit := _BLOCKER.match(line):
                progress.blocker = f" (`{hit['command']}`, pid {hit['pid']})"
        elif hit := _RUNNING.match(line):
            progress.ran.append(hit["stage"])
            yield f"{hit['stage'].split('@')[0]}:"
        elif hit := _SKIPPED.match(line):
            progress.unchanged.append(hit["stage"])
        elif hit := _FAILED.match(line):
            progress.failed, progress.reason = hit["stage"].split("@")[0], hit["reason"]
        elif not _NOISE.match(line):
            yield line


def summary(progress: Progress) -> Iterator[str]:
    """Closing lines: what ran, what the claims came to, where to look."""
    from pipelines.studies import claims

    ran = [stage.split("@")[0] for stage in progress.ran]
    yield ""
    if ran:
        yield f"Ran {', '.join(ran)}; {len(progress.unchanged)} unchanged."
    else:
        yield "Everything is up to date; nothing was run."
    yield f"Claims: {claims.verdicts(paths.results()).summary}"
    yield f"Report: {(paths.results() / 'report.html').relative_to(paths.root())}"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line without the installed ``hetero``."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.repro", description=__doc__)
    parser.add_argument("--profile", help="smoke, default or paper")
    parser.add_argument("--source", help="twin or real")
    options = parser.parse_args(arguments)
    try:
        repro(profile=options.profile, traces=options.source)
    except HeteroError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped.")


if __name__ == "__main__":
    main()
