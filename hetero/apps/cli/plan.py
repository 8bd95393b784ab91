"""``hetero plan``: a plan card of a fleet, or the plan of one method."""

from __future__ import annotations

import difflib
import os
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hetero.apps import ask
from hetero.apps.cli import options
from hetero.errors import require
from hetero.files import writing
from hetero.progress import printed, progress

if TYPE_CHECKING:
    from hetero.apps.cards.card import PlanCard

PROCESSES = -1  # that find the sections of a card side by side: as many as there are cores
_WORTH_S = 15.0  # of CPU until the headline; a process takes 4 s until it is there

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


@options.asking((*ask.SEVERAL, *ask.words("what_if")))
def card(
    asked: dict[str, Any],
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with the card that --json wrote to this file."),
    ] = None,
    power: Annotated[
        bool, typer.Option("--power", help="Add power and energy per token, an estimate.")
    ] = False,
    as_json: options.AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write the card as a page (.html).")] = None,
    output: Annotated[Path | None, options.output("Write the card as JSON.")] = None,
    force: options.Force = False,
) -> None:
    """How a fleet should serve a model, what that delivers and costs, and what binds.

    Every planner is asked; the card says which GPUs form which replicas, how requests are routed,
    the goodput within the targets with its interval and a proven bound, the cost, what limits it,
    what one more machine or another target would change, and where every figure comes from. Where
    no plan meets the request, it says which requests miss which target and what would do.
    """
    from hetero.apps.cards.card import PlanCard
    from hetero.apps.cards.difference import difference
    from hetero.apps.cards.infeasible import NoPlanError
    from hetero.apps.cards.sections import power_table as estimate
    from hetero.cluster import find

    many = len(asked["model"]) > 1
    require(
        not (asked["what_if"] and (html or against or output or many)),
        "--what-if compares plans of one model, and prints no card.",
        resolve="leave out --html, --against and --output, and give one --model; --json keeps it.",
    )
    require(
        not (many and (html or against or asked["cheapest"] or asked["budget"])),
        "Several models share the whole fleet, and have a card each.",
        resolve="leave out --html, --against, --cheapest and --budget; --output writes the cards.",
    )
    require(
        not (power and (as_json or asked["what_if"] or many)),
        "--power adds a table to the text of one card.",
        resolve="leave out --json and --what-if, and give one --model.",
    )
    options.new_file(html, force, ".html")
    numbers = [f"-{k + 1}" if many else "" for k in range(len(asked["model"])) if output]
    files = [output.with_stem(output.stem + number) for number in numbers if output]
    for path in files:
        options.new_file(path, force, ".json")
    other = None if against is None else PlanCard.load(against)
    try:
        found = _planned(not as_json, bool(output or html), **asked)
    except NoPlanError as error:
        if as_json:
            print(options.to_json(error.explanation.to_dict()), end="")
        raise
    cards = found.cards.values() if many else [found] * 2
    for path, one in zip([*files, *([html] if html else ())], cards, strict=False):
        one.save(path, force=force)
    gap = None if other is None else difference(found, other)
    drawn = estimate(found, find(asked["cluster"]).gpu_types) if power else None
    shown = [one for one in (drawn, gap) if one is not None]
    if as_json or many or asked["what_if"]:
        options.show(as_json, (gap or found).to_dict, found)
    elif shown:
        print("\n" + "\n\n".join(map(str, shown)))


def _planned(
    shown: bool, kept: bool, model: list[str], rate: list[float] | None, what_if: Any, **asked: Any
) -> Any:
    """The card, or cards of several models, or a comparison of changes."""
    from hetero.apps.cards.difference import compared
    from hetero.apps.cards.several import several

    first, *more = rate or (None,)
    if more or len(model) > 1:
        return options.told("divide", several, model=model, rate=rate, **asked)
    asked |= {"model": model[0], "rate": first}
    if what_if:
        return options.told("what if", compared, what_if=what_if, **asked)
    return options.told("plan", partial(_in_sections, shown, kept), **asked)


def _in_sections(shown: bool, kept: bool, **asked: Any) -> PlanCard:
    """The card, its sections printed as soon as they are known if it is shown.

    Where it is kept in a file as well, it is finished though nobody reads on, as in `| head`.
    """
    import joblib

    from hetero.apps.cards.answer import grown
    from hetero.apps.cards.sections import texts

    done = 0

    def show(parts: list[str]) -> None:
        nonlocal done
        for one in parts[done:] if shown else ():
            try:
                printed(f"\n{one}" if done else one)
            except BrokenPipeError:
                warnings.simplefilter("ignore")  # of calls that nobody waits for
                if not kept:
                    raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            done += 1

    cards = grown(ask.Ask(**asked))
    card = next(cards)
    show(texts(card)[:2])
    with joblib.parallel_config(n_jobs=PROCESSES if time.process_time() > _WORTH_S else 1):
        for card in cards:
            show(texts(card)[:-3])
    if not asked["brief"]:
        show(texts(card))
    return card


@options.asking(ask.PHASES)
def phases(
    asked: dict[str, Any],
    as_json: options.AsJson = False,
    output: Annotated[Path | None, options.output("Write the plan as JSON.")] = None,
    force: options.Force = False,
) -> None:
    """Divide a mixed fleet into groups, give each a phase, and route requests between them.

    The plan says which GPUs serve which phase with which parallelism, and which share of the
    requests each pair of groups takes. Attainment is an estimate for Poisson arrivals; --requests
    simulates the plan with as many of them.
    """
    from hetero.apps.answers import phases as answers

    options.new_file(output, force)
    with progress(None, f"{asked['search']} search", unit="steps") as advance:
        found = answers.phases(progress=advance, **asked)
    if output is not None:
        with writing(output, force=force) as part:
            part.write_text(options.to_json(found.record), encoding="utf-8")
    options.show(as_json, lambda: found.record, found)


@options.asking(ask.LAYERS)
def layers(
    asked: dict[str, Any],
    as_json: options.AsJson = False,
    figure: options.Figure = None,
    force: options.Force = False,
) -> None:
    """Place the layers of a model on the nodes of a cluster for the largest flow of tokens.

    Prints the best placements with their maximum flow and the bound that no placement exceeds,
    then the best one node by node with its bottleneck.
    """
    from hetero.apps.answers import layouts as answers

    options.new_file(figure, force, *options.PICTURES)
    found = answers.layers(**asked)
    best = found.plan
    of = best.placement.problem
    title = f"{of.llm.name} on {of.name}: {best.flow.tokens_per_s:,.0f} tokens/s"
    options.draw(figure, force, "hetero.plots.placements:figure_of", best.flow, title=title)
    options.show(as_json, lambda: found.record, found)


@options.asking(ask.ISLANDS)
def islands(
    asked: dict[str, Any],
    as_json: options.AsJson = False,
    figure: options.Figure = None,
    force: options.Force = False,
) -> None:
    """Cut GPUs into islands, give each a phase and ranges of input lengths to serve.

    By default the best layout of all, with the bound that no layout exceeds. A search takes the
    divider's layouts and shows its distance from the best of all. GPUs of your own, and prices of
    machines, come from a cluster file.
    """
    from hetero.apps.answers import layouts as answers

    options.new_file(figure, force, *options.PICTURES)
    layouts = asked["batch"] * asked["iterations"]
    with progress(layouts, asked["method"], unit="layouts") as advance:
        found = answers.islands(progress=advance, **asked)
    options.draw(figure, force, "hetero.plots.answers:islands", found.plan)
    options.show(as_json, lambda: found.record, found)


plan = typer.Typer(cls=_CardUnlessNamed, no_args_is_help=True, help=_HELP)
for one in (card, phases, layers, islands):
    plan.command()(one)
