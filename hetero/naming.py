"""Names of machines, regions, models and GPUs in files, and forms of any text that tools can take.

A name is read again by shells, YAML and Kubernetes once a plan is exported, so files may give only
letters, digits, spaces and ``. _ - + = : , @ / ( )``, a letter or digit first. Names made in Python
or kept in older files are not held to that: what writes them for a tool passes them through
:func:`slug`, :func:`host` or :func:`one_line`.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

LONGEST = 100
"""Characters of a name."""

RULE = (
    f"a name of at most {LONGEST} letters, digits, spaces and . _ - + = : , @ / ( ) that begins "
    "with a letter or digit, ends without a space and holds no '..'"
)
"""What a name may hold, in words."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._+=:,@/()-]*[A-Za-z0-9._+=:,@/()-])?")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_LONGEST_LINE = 1000


def good(name: str) -> bool:
    r"""Whether a file may give this name.

    Examples
    --------
    >>> good("meta-llama/Llama-3.1-8B"), good("v100 t=4/0")
    (True, True)
    >>> good("../trav"), good("/etc/x"), good("$(HF_TOKEN)"), good("a\nb")
    (False, False, False, False)
    """
    return len(name) <= LONGEST and ".." not in name and _NAME.fullmatch(name) is not None


def _name(value: str) -> str:
    if not good(value):
        raise ValueError(f"this is not {RULE}")
    return value


def _line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("this holds a line break or another control character")
    return value


Name = Annotated[str, AfterValidator(_name)]
"""A name of a file that pydantic reads."""

Line = Annotated[str, StringConstraints(max_length=_LONGEST_LINE), AfterValidator(_line)]
"""One line of printable text in such a file, empty too."""


def one_line(text: str) -> str:
    r"""The text with a space for every run of line breaks and control characters, cut if long.

    Examples
    --------
    >>> one_line("a\ntouch x\n# b")
    'a touch x # b'
    """
    found = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return found if len(found) <= _LONGEST_LINE else f"{found[:_LONGEST_LINE]} [...]"


def slug(text: str) -> str:
    """Lower-case name of letters, digits and hyphens, as Kubernetes and host names want them.

    Examples
    --------
    >>> slug("v100 t=4/0")
    'v100-t-4-0'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].strip("-") or "x"


def host(name: str) -> str:
    """The name where a host or a file can be called so, else its slug.

    Examples
    --------
    >>> host("V100_a.rack-1"), host("../../trav"), host("rack 1/v100")
    ('V100_a.rack-1', 'trav', 'rack-1-v100')
    """
    fits = len(name) <= LONGEST and ".." not in name and _HOST.fullmatch(name)
    return name if fits else slug(name)
