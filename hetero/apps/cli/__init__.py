"""The ``hetero`` command: one group per noun, every error one sentence on stderr."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.metadata import distribution
from typing import Any

import typer

from hetero import paths
from hetero.errors import HeteroError

app = typer.Typer(
    name="hetero",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Plan, route and simulate LLM serving on mixed fleets of GPUs.",
)

# In the order of the help. A module here holds its command, or group of commands, under its own
# name, or in the one of `_AT`; the others are commands of a checkout, which declares them as entry
# points.
_COMMANDS = (
    *("data", "trace", "fit", "gpus", "profile", "measure", "simulate", "sweep"),
    *("plan", "export", "size", "resilience", "reschedule", "serve"),
    *("observe", "bench"),
    *("repro", "status", "verify", "claims", "figures", "papers", "tables"),
)
_STOPPED = 130  # exit status after Ctrl-C
_AT = {"trace": "data", "gpus": "data"} | dict.fromkeys(("fit", "measure", "observe"), "profile")
_AT |= dict.fromkeys(("simulate", "export", "size", "resilience", "reschedule", "serve"), "answers")
# What has no answer, and the nearest that has one.
_NEAREST = {
    "--autoscale": "`hetero size --curve day.csv --autoscale 0.8`",
    **dict.fromkeys(("--power", "--energy"), "`hetero plan ... --power`, an estimate"),
    **dict.fromkeys(
        ("--tenants", "--priority"), "`hetero simulate card.json --classes chat=0.7,batch=0.3`"
    ),
}


@cache
def command() -> Any:
    """The command with all that it holds, built once: ``app`` keeps what is added to it."""
    of_checkout = distribution("hetero").entry_points.select(group="hetero.commands")
    for name in _COMMANDS:
        more: dict[str, Any] = {}
        if name not in of_checkout.names:
            module = importlib.import_module(f"hetero.apps.cli.{_AT.get(name, name)}")
            found, more = getattr(module, name), getattr(module, "MORE", {}).get(name, {})
        elif paths.is_checkout():
            found = of_checkout[name].load()
        else:
            anything = {"ignore_unknown_options": True, "allow_extra_args": True}
            found, more = _needs_checkout, {"context_settings": anything}
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name, **more)(found)
    made = typer.main.get_command(app)
    _once_each(made)
    return made


def _once_each(command: Any) -> None:
    """Let a command and all below it refuse an option that takes one value and is given two."""
    for below in getattr(command, "commands", {}).values():
        _once_each(below)
    made = command.make_parser

    def make_parser(context: Any) -> Any:
        parser = made(context)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            found = parse(args)
            for one in found[2]:
                given = found[2].count(one)
                if given > 1 and not (one.multiple or one.is_flag or one.count):
                    context.fail(f"{one.opts[0]} takes one value and is given {given} times.")
            return found

        parser.parse_args = parse_args
        return parser

    command.make_parser = make_parser


def _needs_checkout(context: typer.Context) -> None:
    """Only in a checkout of the repository, which has the notebooks and their results."""
    paths.root()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit 1 on an error of the content, 2 on one of the call."""
    try:
        code = command().main(args=arguments, prog_name="hetero", standalone_mode=False)
    except HeteroError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help stands there already
            sys.exit(0)
        asked = getattr(getattr(error, "ctx", None), "command_path", "hetero")
        what = error.format_message()
        end = "" if what.endswith((".", "?")) else "."
        near = _NEAREST.get(getattr(error, "option_name", ""), f"see `{asked} --help`")
        print(f"Error: {what}{end} Resolve: {near}.", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        code = _STOPPED
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # a full disk, a folder that may not be written to, a lost mount
        where = f" ({error.filename})" if error.filename else ""
        print(
            f"Error: {error.strerror or error}{where}. Resolve: free space on the disk, or use "
            "another folder; what was finished is kept.",
            file=sys.stderr,
        )
        sys.exit(1)
    if code == _STOPPED:  # typer returns it where a command is interrupted
        print("Stopped; what was not finished is not written.", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
