"""Damaged files: good ones in which values, lines and bytes are replaced by nasty ones.

What a reader may do with them is little: return, or raise an error that says how to mend the file.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from hetero.errors import HeteroError

#: Of an oracle: the same in every run, or every night so many new ones.
EXAMPLES = (150, pytest.param(2000, marks=pytest.mark.slow))

#: A reader that takes longer [CPU s] hangs; the files are a few hundred bytes.
PATIENCE_S = 5

WORDS = (
    *("", " ", "0", "-1", "-0.0", "0.5", "1e308", "1e309", "-1e400", "nan", "NaN", "inf", "-inf"),
    *("9" * 30, "9" * 5000, "1" + "0" * 400, "2147483648", "9223372036854775808", "0x1F", "1_000"),
    *("true", "null", "~", "None", "=1+1", "'", '"', ",", ";", "\t", "\x00", "\ufeff", "\u202e"),
    *("2023-11-16 18:17:03.97", "2001-99-99", "9999-12-31", "0001-01-01", "1:60:60", "12:30"),
    *("../../etc/passwd", "/dev/zero", "{}", "[]", "[[[[", "{a: b", "}", "- - -", "? [a]", "1 2 3"),
    *("&a [x]", "*a", "<<: *a", "!!python/object/apply:os.system [id]", "!!binary x", "!!set {a}"),
    *("%TAG", "---\n", "...\n", "a: 1\na: 2", "!!float x", "!!int ''", "!!timestamp x", "|", ">"),
    *(
        "$(id)",
        "`id`",
        "a\ntouch x\n#",
        "x\n---\nkind: Pod\n---\n#",
        "..",
        "a" * 300,
        "-rf",
        "${HOME}",
    ),
    *("\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "e\u0301", "[" * 3000),
)

VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -0.0, 0.5, 1e-320, 1e308),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "nan", "1", [], [[]], {}, {"a": 1}),
    *("../../x", "/etc/x", "$(HF_TOKEN)", "a\ntouch x\n#", "x\n---\nkind: Pod\n", "a" * 300, 2**40),
    *([None], [0], [-1], ["a"], [1, 0], [1, 1], [float("nan")], [10**400], {"": None}, [{}]),
)


def drawn(examples: int) -> settings:
    """Settings of a property that is tried on so many examples of :data:`EXAMPLES`."""
    return settings(max_examples=examples, derandomize=examples == EXAMPLES[0])


@dataclass(frozen=True)
class Reader:
    """A reader with a small file that it takes.

    Attributes
    ----------
    ending
        Of the file, which tells some readers its kind.
    good
        Its content.
    read
        Called with the path.
    tree
        The content as nested values, where the format has them; JSON is YAML too.
    """

    name: str
    ending: str
    good: bytes
    read: Callable[[Path], object]
    tree: Any = None


@contextlib.contextmanager
def _patience(what: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"{what} hangs")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check(reader: Reader, content: bytes) -> bool:
    """Read a file of this content; whether it was taken.

    Anything but a result or a :class:`HeteroError` of one sentence and a way out comes through,
    and so does a change of the folder or of the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{reader.ending}"
        path.write_bytes(content)
        said = None
        try:
            with _patience(reader.name):
                reader.read(path)
        except HeteroError as error:
            said = error
        if said is not None:
            assert said.what.strip(), said
            assert said.resolve.strip(), said
            assert len(str(said)) < 4000, f"{reader.name} says {len(str(said))} characters"
        assert path.read_bytes() == content, f"{reader.name} wrote to what it read"
        assert [p.name for p in Path(folder).iterdir()] == [path.name]
    return said is None


def warm_up(reader: Reader) -> None:
    """Read the good file once without a limit: some readers compile code at the first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{reader.ending}"
        path.write_bytes(reader.good)
        reader.read(path)


@st.composite
def damaged(draw: st.DrawFn, reader: Reader) -> bytes:
    """Content of a file that is damaged in a few places, or no such file at all."""
    kinds = ["words", "words", "lines", "bytes", "noise"]
    if reader.tree is not None:
        kinds += ["tree", "tree", "tree"]
    kind = draw(st.sampled_from(kinds))
    if kind == "noise":
        return draw(st.binary(max_size=60))
    if kind == "tree":
        return _damaged_tree(draw, reader.tree).encode("utf-8", "surrogatepass")
    zipped = reader.ending.endswith(".gz") and draw(st.booleans())
    content = gzip.decompress(reader.good) if zipped else reader.good
    for _ in range(draw(st.integers(1, 3))):
        content = {"words": _word, "lines": _line, "bytes": _bytes}[kind](draw, content)
    return gzip.compress(content, mtime=0) if zipped else content


def _word(draw: st.DrawFn, content: bytes) -> bytes:
    places = [m.span() for m in re.finditer(rb"[^\s,:;\"'\[\]{}]+", content)]
    if not places:
        return content
    start, stop = draw(st.sampled_from(places))
    word = draw(st.sampled_from(WORDS)).encode("utf-8", "surrogatepass")
    return content[:start] + word + content[stop:]


def _line(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    k = draw(st.integers(0, len(lines) - 1))
    other = draw(st.integers(0, len(lines) - 1))
    how = draw(st.sampled_from(["drop", "repeat", "swap", "cut", "indent"]))
    if how == "drop":
        del lines[k]
    elif how == "repeat":
        lines.insert(other, lines[k])
    elif how == "swap":
        lines[k], lines[other] = lines[other], lines[k]
    elif how == "cut":
        lines[k] = lines[k][: draw(st.integers(0, len(lines[k])))]
    else:
        lines[k] = b"   " + lines[k]
    return b"".join(lines)


def _bytes(draw: st.DrawFn, content: bytes) -> bytes:
    start = draw(st.integers(0, len(content)))
    stop = min(len(content), start + draw(st.integers(0, 8)))
    return content[:start] + draw(st.binary(max_size=8)) + content[stop:]


def _damaged_tree(draw: st.DrawFn, tree: Any) -> str:
    made = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
        places = list(_places(made))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["value", "value", "value", "drop", "rename", "swap"]))
        if how == "drop":
            del holder[key]
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["", "x", "name", "0", "__class__"]))] = holder.pop(key)
        elif how == "swap":
            other, place = draw(st.sampled_from(places))
            holder[key] = copy.deepcopy(other[place])
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return json.dumps(made)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    found = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(found):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)
