"""Writes the lists of pinned packages again: ``make lock``, with the environment's own uv.

Pins that are there stay as long as pyproject.toml allows them; ``make lock ARGS=--upgrade`` takes
the newest of everything, ``ARGS='--upgrade-package dvc'`` of one package. Every file that the
index has for a version is named by its SHA-256, for every supported Python and platform.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipelines.setup import EXTRAS, OLDEST, SUPPORTED, Pin, pins

# What fills the environment, and builds the project and packages that come as source only.
BUILD = ("uv", "hatchling", "editables", "setuptools", "wheel")
TEST_EXTRAS = ("serving", "dask", "ray", "dev", "docs")
# SkyPilot with all that it needs, and enough of vLLM to parse its command line: what else vLLM
# would bring is several gigabytes, and what the parser imports of it the tests have anyway.
SKYPILOT = ("skypilot==0.14.1",)
VLLM = (
    "apache-tvm-ffi",
    "cbor2",
    "llguidance",
    "msgspec",
    "openai-harmony",
    "partial-json-parser",
    "py-cpuinfo",
    "pybase64",
    "sglang-router==0.3.2",  # beside the dispatcher in `hetero bench serve --beside`
    "vllm-router==0.1.17",
    "vllm==0.33.0",
    "xgrammar",
)
HEADS = {
    "constraints.txt": "What `make repro` and `make lab` need, and what builds it.",
    "tests/constraints.txt": "What `make test`, `check` and `docs` add to constraints.txt.",
    "tests/tools.txt": "SkyPilot, vLLM for its command line alone, Rust routers (`make tools`).",
}


def compiled(
    file: Path, given: tuple[str, ...], *options: str, held: Sequence[Pin] = ()
) -> list[Pin]:
    """What uv makes of requirements: the pins of ``file`` are preferred, those of ``held`` kept."""
    with tempfile.TemporaryDirectory() as folder:
        output, kept = Path(folder, "lock.txt"), Path(folder, "held.txt")
        if file.is_file():
            output.write_bytes(file.read_bytes())
        kept.write_text("\n".join(pin.text for pin in held), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "uv", "pip", "compile", *options, "-", "--quiet", "--universal",
             "--generate-hashes", "--python-version", OLDEST, "--no-annotate", "--no-header",
             "--no-emit-index-url", "--constraint", str(kept), "--output-file", str(output),
             *sys.argv[1:]],
            check=True, input="\n".join(given), text=True,
        )  # fmt: skip
        return pins(output.read_text(encoding="utf-8"))


def processor_hashes(torch: Pin, before: list[Pin]) -> set[str]:
    """Hashes of torch's builds for the processor alone that pip finds here, and those known before.

    They are in no public list that uv reads: pip finds them in a folder or an index of its own.
    """
    known = {digest for pin in before if pin.text == torch.text for digest in pin.hashes}
    for version in SUPPORTED:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder,
                 "--only-binary", ":all:", "--python-version", version, f"{torch.text}+cpu"],
                check=False, capture_output=True,
            )  # fmt: skip
            for file in Path(folder).iterdir():
                known.add("sha256:" + hashlib.sha256(file.read_bytes()).hexdigest())
    return known


def without(found: list[Pin], others: list[Pin]) -> list[Pin]:
    """The pins of packages that the others do not have."""
    names = {pin.name for pin in others}
    return [pin for pin in found if pin.name not in names]


def write(name: str, found: list[Pin]) -> None:
    """Write a list, sorted by name."""
    lines = [f"# {HEADS[name]}", "# Every file by its hash; written by `make lock`."]
    lines += [pin.lines for pin in sorted(found, key=lambda pin: (pin.name, pin.text))]
    Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(found)} packages")


def main() -> None:
    """Write all three lists."""
    first, second, tools = map(Path, HEADS)
    before = pins(first.read_text(encoding="utf-8"))

    def extras(names: tuple[str, ...]) -> list[str]:
        return [word for name in names for word in ("--extra", name)]

    base = compiled(first, BUILD, "pyproject.toml", *extras(EXTRAS))
    torch = next(pin for pin in base if pin.name == "torch")
    base[base.index(torch)] = Pin(
        torch.text, tuple(sorted({*torch.hashes, *processor_hashes(torch, before)}))
    )
    write(first.as_posix(), base)
    # Both at once, so that they fit each other; then only what is new.
    every = compiled(second, BUILD, "pyproject.toml", *extras(EXTRAS + TEST_EXTRAS), held=base)
    write(second.as_posix(), without(every, base))
    parser = compiled(tools, VLLM, "--no-deps")
    write(tools.as_posix(), parser + without(compiled(tools, SKYPILOT, held=parser), parser))


if __name__ == "__main__":
    main()
