"""Makes the environment: ``make setup``, with nothing but a bare Python and its pip.

Every file comes from the lists of pinned packages, checked by its hash: ``constraints.txt`` for
the pipeline and JupyterLab, ``tests/constraints.txt`` for what the tests add. The lists are
complete, so pip resolves nothing; the project itself goes in last, editable and without
dependencies. Where uv is on the path it does the same in less time.

A run that is cut short leaves what is whole, and the next goes on from there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SUPPORTED = ("3.11", "3.12", "3.13")
OLDEST = SUPPORTED[0]
EXTRAS = ("pipeline", "lab", "bayes")  # of pyproject.toml, for `make repro` and `make lab`
BUILD = {"editables", "hatchling", "packaging", "pathspec", "pluggy", "setuptools",
         "trove-classifiers", "wheel"}  # fmt: skip
CUDA = ("cuda-", "nvidia-", "triton")  # what torch's build for CUDA cannot be imported without
CUDA_SIZE = "about 4 GB more on disk"
LOG = "setup.log"
_CUT = ".unfinished"  # lies in the environment while something is being installed


class Pin(NamedTuple):
    """One package of a list, at one version: the requirement, and the hashes of its files."""

    text: str
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its normalised name."""
        return re.split(r"[\[=]", self.text)[0]

    @property
    def lines(self) -> str:
        """As a requirements file has it."""
        return " \\\n".join([self.text, *(f"    --hash={digest}" for digest in self.hashes)])


class SetupError(Exception):
    """What went wrong, in one sentence, and what to do."""


class AlteredError(SetupError):
    """A file is not the one that was pinned."""


def pins(text: str) -> list[Pin]:
    r"""The packages of a list.

    Examples
    --------
    >>> pins("a==1 ; os_name == 'nt' \\\n    --hash=sha256:0f\n")
    [Pin(text="a==1 ; os_name == 'nt'", hashes=('sha256:0f',))]
    """
    joined = (line.partition("#")[0].strip() for line in text.replace("\\\n", " ").split("\n"))
    split = ([part.strip() for part in line.split("--hash=")] for line in joined if line)
    return [Pin(first, tuple(hashes)) for first, *hashes in split]


def cause(log: str, room: int) -> SetupError:
    """What pip, uv or venv stumbled over, as a sentence and what to do about it.

    Parameters
    ----------
    log
        All they printed.
    room
        Bytes free where the environment or temporary files go, the smaller of the two.
    """
    altered = re.search(r"(?s)DO NOT MATCH THE HASHES.*?\n\s+(\S+) from", log) or re.search(
        r"(?i)hash mismatch for `?([\w.=+-]+)", log
    )
    if altered:
        return AlteredError(
            f"The file that came for {altered[1]} is not one that was pinned: its hash differs, "
            "and it was not installed. Resolve: run make setup again; if it stays, something "
            "between here and the package index alters files."
        )
    if "No space left on device" in log or room < 2**24:
        return SetupError(
            "The disk is full. Resolve: make room, or name a larger disk (VENV= for the "
            "environment, TMPDIR= for temporary files), and run make setup again."
        )
    if re.search(r"ensurepip\s+is\s+not\s+available", log):
        return SetupError(
            "This Python has no venv. Resolve: install it (python3-venv), or run make PYTHON=."
        )
    if re.search(
        r"(?i)connection|resolution|dns error|timed? ?out|error sending request|proxy", log
    ):
        return SetupError(
            "No package index answers. Resolve: look at the network, and at pip's settings "
            "(python -m pip config list); then run make setup again."
        )
    if missing := re.search(r"No matching distribution found for (\S+)", log):
        return SetupError(
            f"The package index has no file of {missing[1]} for this Python and machine. "
            f"Resolve: take Python {' or '.join(SUPPORTED)} on Linux, or another index."
        )
    said = [line.strip() for line in log.splitlines() if "error" in line.lower()]
    return SetupError(
        f"{said[-1] if said else 'It stopped.'} Resolve: read {LOG} in the environment."
    )


def broken(site: Path) -> list[Path]:
    """Packages of which a file is missing or cut short, as an interrupted installation leaves them.

    Returns their ``.dist-info`` folders.
    """
    found = []
    for info in sorted(site.glob("*.dist-info")):
        record = info / "RECORD"
        rows = (
            csv.reader(record.read_text(encoding="utf-8").splitlines()) if record.is_file() else ()
        )
        sizes = [(site / row[0], row[2]) for row in rows if len(row) == 3 and row[2]]
        whole = all(file.is_file() and file.stat().st_size == int(size) for file, size in sizes)
        if not sizes or not whole:
            found.append(info)
    return found


class Environment:
    """The environment in a folder, and the tool that fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.uv = shutil.which("uv")

    def run(self, *command: str | Path, env: dict[str, str] | None = None) -> str:
        """What a command prints; raises SetupError with the cause if it fails."""
        done = subprocess.run(
            [str(word) for word in command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1",
                 **(env or {})},
        )  # fmt: skip
        log = self.folder / LOG
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as end:
            end.write(done.stdout)  # a full disk is told below
        if done.returncode == 0:
            return done.stdout
        folders = (
            self.folder if self.folder.is_dir() else self.folder.parent,
            tempfile.gettempdir(),
        )
        room = min(shutil.disk_usage(folder).free for folder in folders)
        raise cause(done.stdout, room)

    def make(self) -> None:
        """A bare environment, where none is or where it cannot be used."""
        probe = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
        if self.python.exists():
            done = subprocess.run(
                [self.python, "-c", probe], capture_output=True, text=True, check=False
            )
            if done.stdout.strip() in SUPPORTED:
                return
        self.run(sys.executable, "-m", "venv", "--clear", self.folder)

    def site(self) -> Path:
        """The folder of its packages."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(self.run(self.python, "-c", code).strip())

    def mend(self) -> None:
        """Forget packages that an interrupted run left in pieces, so that they come again."""
        if not (self.folder / _CUT).exists():
            return
        for info in broken(self.site()):
            shutil.rmtree(info)

    def install(self, wanted: Iterable[Pin]) -> None:
        """Install pinned packages, each file checked by its hash."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as listed:
            listed.write("\n".join(pin.lines for pin in wanted))
            listed.flush()
            self._install("--require-hashes", "-r", listed.name)

    def project(self, source: Path) -> None:
        """Install the project itself, editable: pip takes no hash for a folder."""
        self._install("--editable", str(source))

    def _install(self, *what: str) -> None:
        options = ("--no-deps", "--no-build-isolation", *what)
        # Bytecode is written at first use, and only of what is used; unless it never would be.
        now = sys.dont_write_bytecode
        if self.uv is None:
            compiling = () if now else ("--no-compile",)
            self.run(self.python, "-m", "pip", "install", *compiling, *options)
        else:
            compiling = ("--compile-bytecode",) if now else ()
            command = (self.uv, "pip", "install", "--python", self.python, *compiling, *options)
            self.run(*command, env=self._uv_env())

    def _uv_env(self) -> dict[str, str]:
        """Where pip looks for files: uv reads none of pip's settings.

        Like pip, the best of all places counts and not the first; every file has its hash anyway.
        """
        given: dict[str, list[str]] = {}
        for line in self.run(self.python, "-m", "pip", "config", "list").splitlines():
            key, _, value = line.partition("=")
            with_key = given.setdefault(key.rpartition(".")[2], [])
            with_key += [word for word in ast.literal_eval(value).split() if word not in with_key]
        env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
        if "find-links" in given:
            env["UV_FIND_LINKS"] = ",".join(given["find-links"])
        if "index-url" in given:
            env["UV_DEFAULT_INDEX"] = given["index-url"][-1]
        if "extra-index-url" in given:
            env["UV_INDEX"] = " ".join(given["extra-index-url"])
        return {key: value for key, value in env.items() if key not in os.environ}

    def torch_without_cuda(self, torch: Pin) -> bool:
        """Install torch's build for the processor alone, if pip finds it and its hash is pinned."""
        wanted = Pin(f"{torch.text}+cpu", torch.hashes)
        for there in self.site().glob(f"torch-{torch.text.partition('==')[2]}*.dist-info"):
            return "+cpu" in there.name
        offered = self.run(self.python, "-m", "pip", "index", "versions", "torch")
        if wanted.text.partition("==")[2] not in offered:
            return False
        try:
            self.install([wanted])
        except AlteredError:
            say("  the build for the processor that pip finds is not one that was pinned.")
            return False
        return True


def say(text: str) -> None:
    """A line of progress."""
    print(text, flush=True)


def set_up(folder: Path, root: Path, tests: bool) -> None:
    """Make the environment of a checkout, or bring it up to date.

    Parameters
    ----------
    folder
        Where the environment is.
    root
        The checkout.
    tests
        Whether with what the tests need.
    """
    own = Environment(folder)
    say(f"{folder}: Python {sys.version.split()[0]}, filled by {'uv' if own.uv else 'pip'}")
    own.make()
    own.mend()
    cut = folder / _CUT
    cut.touch()
    listed = pins((root / "constraints.txt").read_text(encoding="utf-8"))
    say("1 of 4: what builds packages")
    own.install(pin for pin in listed if pin.name in BUILD)
    torch = next(pin for pin in listed if pin.name == "torch")
    cuda = [pin for pin in listed if pin.name.startswith(CUDA)]
    say("2 of 4: torch")
    if not own.torch_without_cuda(torch):
        if sys.platform == "linux":
            say(
                f"  for CUDA, with its {len(cuda)} libraries: {CUDA_SIZE}. The build for the "
                "processor alone is taken where pip finds it (find-links, or an index of your own)."
            )
        own.install([torch, *cuda])
    first = {*BUILD, "torch", *(pin.name for pin in cuda)}
    rest = [pin for pin in listed if pin.name not in first]
    if tests:
        rest += pins((root / "tests" / "constraints.txt").read_text(encoding="utf-8"))
    what = ", those of the tests too" if tests else ""
    say(f"3 of 4: {len({pin.name for pin in rest})} packages{what}")
    own.install(rest)
    say("4 of 4: hetero itself")
    own.project(root)
    cut.unlink()


def main() -> None:
    """Read the command line, and end with one sentence where something is wrong."""
    parser = argparse.ArgumentParser(description="Make the environment of this checkout.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tests", action="store_true", help="with what the tests need")
    given = parser.parse_args()
    try:
        set_up(given.folder.absolute(), Path(__file__).parents[1], given.tests)
    except SetupError as error:
        sys.exit(f"Error: {error}")
    except OSError as error:
        sys.exit(f"Error: {error}. Resolve: make room or rights there, and run make setup again.")
    except KeyboardInterrupt:
        sys.exit("Error: Set-up was interrupted. Resolve: run make setup again; it goes on.")


if __name__ == "__main__":
    main()
