"""``hetero bench``: how fast this library is here, and beside what."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

from hetero.apps.cli import options
from hetero.errors import ParameterError

BENCHES = {
    # Name: module and function of pipelines.bench, what it measures.
    "simulate": ("simulator:bench", "simulator and routers: speed, memory, decisions, start"),
    "search": ("search:bench", "search for plans beside a plain enumeration, random fleets"),
    "cards": ("cards:bench", "cards of random fleets beside ten minutes of traffic each"),
    "serve": ("serve:bench", "time and processor that the dispatcher adds; a minute, two cores"),
    "soak": ("serve:soak", "memory of the dispatcher over many requests"),
    "beside": ("beside:bench", "dispatcher beside the routers of `make tools`, in turns"),
    "live": ("live:bench", "two real engines behind every router; eight minutes, two cores"),
    "arena": ("recorded:arena", "a plan by every planner, 8 to 256 GPUs"),
    "islands": ("recorded:islands", "island planners: programs, layouts, searches"),
    "phases": ("recorded:phases", "plans of split phases: tabu search, ours, light"),
    "pipelines": ("recorded:pipelines", "660 simulated seconds of Helix's clusters"),
    "placement": ("recorded:placement", "placements of layers on Helix's clusters, by step"),
    "milp": ("milp:milp", "Helix's integer program: objective and bound over a quarter of an hour"),
}
_NAMES = "  \n".join(f"`{name}`: {about}" for name, (_, about) in BENCHES.items())

group = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    context_settings={"allow_interspersed_args": True},
    help=f"Measure how fast hetero is on this machine.\n\n{_NAMES}",
)


def _say(what: str) -> None:
    """One line: in a terminal in place of the last one."""
    begin, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{begin}{what}", end=end, file=sys.stderr, flush=True)


@group.callback()
def bench(
    name: Annotated[str, typer.Argument(help="What is measured.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="What differs from the default, as `repeats=5`; a wrong one shows all."
        ),
    ] = None,
    as_json: options.AsJson = False,
    record: Annotated[
        bool, typer.Option("--record", help="Write what notebooks cite to data/measured.")
    ] = False,
) -> None:
    """Measure one thing."""
    if name not in BENCHES:
        raise ParameterError(f"There is no bench '{name}'.", resolve=f"use {', '.join(BENCHES)}.")
    module, _, called = BENCHES[name][0].partition(":")
    function = getattr(import_module(f"pipelines.bench.{module}"), called)
    given = _given(function, name, settings or [])
    if "progress" in inspect.signature(function).parameters:
        given["progress"] = _say
    if "record" in inspect.signature(function).parameters:
        given["record"] = record
    found = function(**given)
    _say("")
    if record:
        found.keep()
    print(options.to_json(found.record()) if as_json else f"{found}\n", end="")


def _given(function: Callable[..., Any], name: str, settings: list[str]) -> dict[str, Any]:
    """Arguments of a bench from words such as ``repeats=5``."""
    known = {
        key: one.default
        for key, one in inspect.signature(function).parameters.items()
        if key not in ("progress", "record")
    }
    given: dict[str, Any] = {}
    for word in settings:
        key, _, value = word.partition("=")
        kind: Any = type(known.get(key))
        try:
            given[key] = ["false", "true"].index(value) == 1 if kind is bool else kind(value)
            good = key in known and (kind in (bool, str) or key == "seed" or given[key] > 0)
        except (TypeError, ValueError):
            good = False
        if not good:
            have = ", ".join(f"{key}={value}".lower() for key, value in known.items())
            raise ParameterError(f"`{name}` cannot do '{word}'.", resolve=f"it has {have}.")
    return given
