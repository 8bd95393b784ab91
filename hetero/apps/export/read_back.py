"""Reads what is about to be written as the tools will, and compares it with what was meant.

Names come from files that others wrote. They are checked where they are read and quoted where they
are written; this is the proof that both held.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hetero.errors import ExportError

_ENDS = re.compile(r"[;&|()\n]+")
_MARKS = "();<>|&\n"
_KEYWORDS = ("if", "then", "else", "fi")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_STARTED = frozenset({"vllm", "vllm-router"})
_AROUND = frozenset({"[", "echo", "export", "head", "hostname", "cut", "wait"})


def yaml(text: str, meant: Sequence[Any]) -> str:
    """The text, whose documents are these values and no others."""
    try:
        found = list(YAML(typ="safe", pure=True).load_all(text))
    except YAMLError:
        found = []
    if found != list(meant):
        raise _other("YAML")
    return text


def script(text: str, meant: Iterable[Sequence[str]] | None = None, *, engines: int = 1) -> str:
    """The shell script, which starts vLLM or its router and otherwise only tells what it needs.

    Parameters
    ----------
    meant
        Words of each vLLM command with the variables before it; by default only counted.
    engines
        Number of such commands where their words are not given.
    """
    found = commands(text)
    started = [words for words in found if _program(words) in _STARTED]
    wanted = None if meant is None else [tuple(words) for words in meant]
    same = started == wanted if wanted is not None else len(started) == engines
    others = {_program(words) for words in found} - _AROUND - _STARTED - {""}
    if others or not same or not _parses(text):
        raise _other("script")
    return text


def commands(text: str) -> list[tuple[str, ...]]:
    r"""Words of every simple command of a shell script, those in ``$(...)`` included.

    Examples
    --------
    >>> commands("# note\nA=1 vllm serve 'a b' &\nwait\n")
    [('A=1', 'vllm', 'serve', 'a b'), ('wait',)]
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_MARKS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    try:
        for word in lexer:
            if _ENDS.fullmatch(word):
                found.append([])
            else:
                found[-1].append(word)
    except ValueError:  # a quote that is not closed
        raise _other("script") from None
    kept = [words[words[0] in _KEYWORDS :] for words in found if words]
    return [tuple(words) for words in kept if words]


def _program(words: Sequence[str]) -> str:
    return next((word for word in words if not _ASSIGNED.match(word)), "")


def _parses(text: str) -> bool:
    shell = shutil.which("sh")
    return (
        shell is None
        or subprocess.run([shell, "-n"], input=text.encode(), capture_output=True).returncode == 0
    )


def _other(what: str) -> ExportError:
    return ExportError(
        f"The {what} that was made does not read as it was meant.",
        resolve="rename machines and models plainly, with letters, digits and hyphens.",
    )
