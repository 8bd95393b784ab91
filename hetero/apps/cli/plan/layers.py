"""``hetero plan layers``: which node of a cluster holds which layers of a model."""

from __future__ import annotations

from pathlib import Path

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("layers")(layers)


def layers(
    cluster: options.Cluster,
    model: options.Model = "Llama-2-70B",
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    figure: options.Figure = None,
    force: options.Force = False,
) -> None:
    """Place the layers of a model on the nodes of a cluster for the largest flow of tokens.

    Prints the best placements with their maximum flow and the bound that no placement exceeds,
    then the best one node by node with its bottleneck.
    """
    from hetero import catalog
    from hetero.cluster import find
    from hetero.files import check_new
    from hetero.planners.helix import plan

    if figure is not None:
        options.ending(figure, options.PICTURES)
        check_new(figure, force=force)
    found = plan(find(cluster), catalog.find_llm(model), seed=seed)
    if figure is not None:
        _draw(found.best[0].flow, figure, force)
    if not as_json:
        print(found)
        print()
        print(found.best[0].flow)
        print(f"Planned in {found.seconds:.1f} s.")
        return
    best = found.best[0]
    print(
        options.to_json(
            {
                "tokens_per_s": best.tokens_per_s,
                "bound_tokens_per_s": best.bound,
                "gap": best.gap,
                "bottleneck": best.flow.bottleneck,
                "layers": {node.name: list(held) for _, node, held in best.placement.nodes()},
                "seconds": found.seconds,
            }
        ),
        end="",
    )


def _draw(flow: object, path: Path, force: bool) -> None:
    from hetero.files import writing
    from hetero.placement import Flow
    from hetero.plots import figures
    from hetero.plots.placements import figure_of

    assert isinstance(flow, Flow)
    figures.use_style()
    placement = flow.network.placement
    picture = figure_of(
        flow,
        title=f"{placement.problem.llm.name} on {placement.problem.name}: "
        f"{flow.tokens_per_s:,.0f} tokens/s",
    )
    with writing(path, force=force) as part:
        picture.savefig(part, format=path.suffix[1:])
