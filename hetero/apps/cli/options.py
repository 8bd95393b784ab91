"""Options of commands, from the words of their functions, and their checks."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Optional, TypeVar

import typer

from hetero.apps.ask import Word, Words, choice, parameter, positive, words
from hetero.errors import CatalogError, ParameterError, require
from hetero.files import check_new, writing
from hetero.progress import progress

T = TypeVar("T")


def asking(taken: Words) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the words of a function, which its first argument then holds by name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [parameter(one, option(one)) for one in taken]
        kinds = inspect.Parameter

        @functools.wraps(command)
        def call(**given: Any) -> None:
            for name in {"cluster", "within"} & given.keys():
                _say_fleet(given[name] or None)
            command({one.name: given.pop(one.name) for one in taken}, **given)

        every = [one.replace(kind=kinds.KEYWORD_ONLY) for one in (*shared, *own)]
        call.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        return call

    return decorate


def _say_fleet(given: object) -> None:
    """Print, on the side, the cluster file that was understood of what another tool printed."""
    from hetero import cluster
    from hetero.cluster import found

    if not isinstance(given, str) or (given.endswith(".json") and not found.lists_nodes(given)):
        return
    with suppress(CatalogError):  # the command itself says what is wrong, in its turn
        fleet = cluster.find(given)
        if found.NOTE in fleet.notes:
            head = f"# {given} is read as this cluster file; save it to add prices or links."
            print(f"{head}\n{found.text_of(fleet)}", file=sys.stderr)


def option(one: Word) -> Any:
    """The annotation of a word, of which typer makes an option or an argument."""
    type_ = Any if one.how["type"] == "slo" else one.how["type"]
    return Annotated[Optional[type_] if one.default is None else type_, made(one)]  # noqa: UP045


def made(one: Word) -> Any:
    """The option or argument of a word, without its type."""
    how = dict(one.how)
    type_, kind, above = (how.pop(key, None) for key in ("type", "kind", "above_zero"))
    names, argument = how.pop("names", ()), how.pop("argument", False)
    if type_ == "slo":
        how |= {"metavar": "<str>", "parser": _targets}
    if argument:
        return typer.Argument(help=one.help, **how)
    if kind:
        return one_of(kind, one.help, *names)
    return above_zero(one.help) if above else typer.Option(*names, help=one.help, **how)


def one_of(kind: str, help_: str, *names: str) -> Any:
    """Option with one of a ``Literal``'s values, or of a collection's; ``kind`` is its path."""

    def known(param: typer.CallbackParam, value: str | None) -> Any:
        return value and choice(param.opts[0], value, resolve_name(kind))

    return typer.Option(*names, help=help_, metavar="<str>", callback=known)


def above_zero(help_: str) -> Any:
    """Option with a finite number above 0, or none."""

    def checked(param: typer.CallbackParam, value: float | None) -> float | None:
        return value if value is None else positive(param.opts[0], value)

    return typer.Option(help=help_, callback=checked)


def _targets(text: str) -> Any:
    return resolve_name("hetero.simulator:Slo").read(text, "--slo")


# Of commands whose other options are their own.
_SHARED = "source columns seed schedule_ahead prefix_cache prefix_share"
_KNOWN = {one.name: made(one) for one in words(_SHARED)}
Source = Annotated[Any, _KNOWN["source"]]
Columns = Annotated[str, _KNOWN["columns"]]
Seed = Annotated[int, _KNOWN["seed"]]
ScheduleAhead = Annotated[bool | None, _KNOWN["schedule_ahead"]]
PrefixCache = Annotated[bool | None, _KNOWN["prefix_cache"]]
PrefixShare = Annotated[float | None, _KNOWN["prefix_share"]]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Figure = Annotated[Path | None, typer.Option(help="Draw the plan into this file (.png, .svg).")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]

PICTURES = (".png", ".svg")
"""Endings of figures."""

TABLES = (".csv", ".csv.gz", ".parquet")
"""Endings of tables with a row per request."""


def output(help_: str) -> Any:
    """Option ``-o``, ``--output`` of a command, which says what it writes."""
    return typer.Option("-o", "--output", help=help_)


def new_file(path: Path | None, force: bool, *endings: str) -> None:
    """Refuse an output file that could not be written, or does not end as its kind should.

    Examples
    --------
    >>> new_file(Path("plan.png"), False, *PICTURES)
    """
    if path is None:
        return
    known = " or ".join(filter(None, (", ".join(endings[:-1]), *endings[-1:])))
    require(
        path.name.endswith(endings or ""),
        f"The ending of {path.name} is of no known kind.",
        resolve=f"end its name with {known}.",
    )
    check_new(path, force=force)


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers of an option that takes several, by commas.

    Examples
    --------
    >>> whole_numbers("--batch", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(
            f"{option} cannot read '{text}'.", resolve="write whole numbers, such as 1,2,4."
        ) from None


def show(as_json: bool, record: Callable[[], object], *shown: object) -> None:
    """Print a record as JSON, or in its place what is shown, an empty line between."""
    print(to_json(record()) if as_json else "\n\n".join(map(str, shown)) + "\n", end="")


def draw(
    path: Path | None, force: bool, picture: str, *items: object, about: str = "", **more: object
) -> None:
    """Draw a picture, named as ``module:function``, into a file, if one is asked for."""
    if path is None:
        return
    from hetero.plots import figures

    figures.use_style()
    drawn = resolve_name(picture)(*items, **more)
    if about:
        figures.stamp(drawn, about)
    with writing(path, force=force) as part:
        drawn.savefig(part, format=path.suffix[1:])
    figures.close(drawn)


def told(label: str, function: Callable[..., T], **asked: Any) -> T:
    """What a function answers, and on the way what it is at."""
    with progress(None, label, unit="") as advance:
        return function(progress=partial(advance, 0), **asked)


def to_json(value: object) -> str:
    """JSON text with a line end, as every ``--json`` option prints it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
