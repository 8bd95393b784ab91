"""``hetero plan``: a plan card of a fleet, or the plan of one method; one module per method."""

from __future__ import annotations

import difflib
from typing import Any

import typer
from typer.core import TyperGroup

from hetero.apps.cli.plan.card import card
from hetero.apps.cli.plan.islands import islands
from hetero.apps.cli.plan.layers import layers
from hetero.apps.cli.plan.phases import phases

_HELP = """Plan how a fleet serves a model.

`hetero plan CLUSTER --model M` prints the plan card: every planner is asked, and the best plan is
shown with what it delivers, costs and is limited by (`hetero plan card --help` lists its options).
The commands below plan by one method each.
"""


class _CardUnlessNamed(TyperGroup):
    """A group whose first command may be left out: what is no command is its cluster."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the default command where none is named."""
        if args and args[0] not in ("--help", *self.commands):
            # A misspelt command is told as such, unless it could be a cluster.
            near = difflib.get_close_matches(args[0], list(self.commands), n=1, cutoff=0.75)
            if not near or args[0].endswith((".yaml", ".yml")):
                args = ["card", *args]
        return super().parse_args(ctx, args)


plan = typer.Typer(cls=_CardUnlessNamed, no_args_is_help=True, help=_HELP)
for one in (card, phases, layers, islands):
    plan.command()(one)
