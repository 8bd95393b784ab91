"""Makes the environment: ``make setup``, with nothing but a bare Python and its pip.

Every file comes from the lists of pinned packages, checked by its hash: ``constraints.txt`` for
the pipeline and JupyterLab, ``tests/constraints.txt`` for what the tests add. The lists are
complete, so nothing is resolved; the project itself goes in editable and without dependencies,
and the simulator's kernels are compiled. pip brings uv, pinned like the rest, which fills the
environment in a fraction of pip's time; where no file of uv fits the machine, pip does it all.

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
import time
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
EXAMPLE = "thunderserve-a5000-pair --model Llama-3-8B --slo ttft=2s,tpot=100ms"
BEAT_S = 5  # between two lines of progress at most
# Where uv reads what pip's settings say; several values are parted by the sign behind the name.
UV_NAMES = {
    "cert": ("SSL_CERT_FILE", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "proxy": ("ALL_PROXY", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
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


class MissingError(SetupError):
    """No file of a package fits this Python and machine."""


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
            "environment, UV_CACHE_DIR= and TMPDIR= for what passes through), and run make setup "
            "again."
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
    if missing := re.search(r"(?:No matching distribution found for|you require) ([^\s,]+)", log):
        return MissingError(
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
    """The environment in a folder, and the tool that fills it: pip, and uv once it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.filler: tuple[str | Path, ...] = (self.python, "-m", "pip", "install")
        self.settings: dict[str, str] = {}

    def run(self, *command: str | Path, env: dict[str, str] | None = None) -> str:
        """What a command prints; raises SetupError with the cause if it fails."""
        start = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1",
                 **(env or {})},
        ) as tool:  # fmt: skip
            while True:
                try:
                    printed = tool.communicate(timeout=BEAT_S)[0].decode(errors="replace")
                    break
                except subprocess.TimeoutExpired as so_far:
                    said = (so_far.output or b"").decode(errors="replace").split("\n")
                    last = next((line.strip() for line in reversed(said) if line.strip()), "")
                    say(f"  ... {time.monotonic() - start:.0f} s  {last[:80]}".rstrip())
        with contextlib.suppress(OSError), (self.folder / LOG).open("a", encoding="utf-8") as end:
            end.write(printed)  # a full disk is told below
        if tool.returncode == 0:
            return printed
        folders = (
            self.folder if self.folder.is_dir() else self.folder.parent,
            tempfile.gettempdir(),
        )
        raise cause(printed, min(shutil.disk_usage(folder).free for folder in folders))

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

    def bring_uv(self, pin: Pin) -> bool:
        """Have uv fill the environment from here on, if there is a file of it for this machine."""
        try:
            self.install([pin], "--only-binary", ":all:")
        except MissingError:
            return False
        self.settings = self.uv_settings()
        self.filler = (self.folder / "bin" / "uv", "pip", "install", "--python", self.python)
        return True

    def install(self, wanted: Iterable[Pin], *options: str) -> None:
        """Install pinned packages, each file checked by its hash."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as listed:
            listed.write("\n".join(pin.lines for pin in wanted))
            listed.flush()
            self._install(*options, "--require-hashes", "-r", listed.name)

    def project(self, source: Path) -> None:
        """Install the project itself, editable: pip takes no hash for a folder."""
        self._install("--editable", str(source))

    def _install(self, *what: str) -> None:
        # Bytecode is written at first use, and only of what is used; unless it never would be.
        now = sys.dont_write_bytecode
        if self.settings:
            compiling = ("--compile-bytecode",) if now else ()
        else:
            compiling = () if now else ("--no-compile",)
        options = ("--no-deps", "--no-build-isolation", *compiling, *what)
        self.run(*self.filler, *options, env=self.settings)

    def uv_settings(self) -> dict[str, str]:
        """Where pip looks for files: uv reads none of pip's settings.

        Like pip, the best of all places counts and not the first; every file has its hash anyway.
        """
        env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
        told = self.run(self.python, "-m", "pip", "config", "list").splitlines()
        # Sorted by name; of pip's settings the variables of the environment come first and count.
        for line in sorted(told, key=lambda line: line.startswith(":env:")):
            key, _, value = line.partition("=")
            if name := UV_NAMES.get(key.rpartition(".")[2]):
                env[name[0]] = name[1].join(ast.literal_eval(value).split())
        return {key: value for key, value in env.items() if key not in os.environ}

    def torch_without_cuda(self, torch: Pin) -> bool:
        """Install torch's build for the processor alone, if pip finds it and its hash is pinned."""
        for there in self.site().glob(f"torch-{torch.text.partition('==')[2]}*.dist-info"):
            return "+cpu" in there.name
        try:
            self.install([Pin(f"{torch.text}+cpu", torch.hashes)])
        except MissingError:
            return False
        except AlteredError:
            say("  the build for the processor that is found is not one that was pinned.")
            Environment(self.folder).install([torch])  # pip passes it over, uv would take it again
            return False
        return True

    def compile_kernels(self, root: Path) -> bool:
        """Compile the simulator's kernels, which tell how far they are."""
        command = (self.python, "-m", "hetero.simulator.warm")
        with (
            (self.folder / LOG).open("a", encoding="utf-8") as log,
            subprocess.Popen(
                command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as started,
        ):
            for line in started.stdout or ():
                log.write(line)
                if line.startswith("compiling "):
                    say(f"  {line.strip()}")
        return started.returncode == 0


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
    say(f"{folder}: Python {sys.version.split()[0]}")
    own.make()
    own.mend()
    cut = folder / _CUT
    cut.touch()
    listed = pins((root / "constraints.txt").read_text(encoding="utf-8"))
    named = {pin.name: pin for pin in listed}
    say("1 of 5: uv, and what builds packages")
    if not own.bring_uv(named["uv"]):
        say("  uv has no file for this machine; pip takes minutes where it takes seconds.")
    own.install(named[name] for name in BUILD)
    torch = named["torch"]
    cuda = [pin for pin in listed if pin.name.startswith(CUDA)]
    say("2 of 5: torch")
    if not own.torch_without_cuda(torch):
        if sys.platform == "linux":
            say(
                f"  for CUDA, with its {len(cuda)} libraries: {CUDA_SIZE}. The build for the "
                "processor alone is taken where pip finds it (find-links, or an index of your own)."
            )
        own.install([torch, *cuda])
    first = {*BUILD, "uv", "torch", *(pin.name for pin in cuda)}
    rest = [pin for pin in listed if pin.name not in first]
    if tests:
        rest += pins((root / "tests" / "constraints.txt").read_text(encoding="utf-8"))
    what = ", those of the tests too" if tests else ""
    say(f"3 of 5: {len({pin.name for pin in rest})} packages{what}")
    own.install(rest)
    say("4 of 5: hetero itself")
    own.project(root)
    cut.unlink()
    say("5 of 5: kernels of the simulator")
    if not own.compile_kernels(root):
        say(f"  not compiled (see {LOG} in the environment): the first command will do it.")
    enter = f"source {min(os.path.relpath(folder), str(folder), key=len)}/bin/activate"
    say(f"Done. Next: {'make test' if tests else f'{enter} && hetero plan {EXAMPLE}'}")


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
