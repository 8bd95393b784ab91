"""``hetero plan layers``: which node of a cluster holds which layers of a model."""

from __future__ import annotations

from hetero.apps.cli import options


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
    from hetero.apps.capacity.draws import flow_draws, middle
    from hetero.cluster import find
    from hetero.planners.helix import place

    options.new_file(figure, force, *options.PICTURES)
    llm = catalog.find_llm(model)
    found = place(find(cluster), llm, seed=seed)
    best = found.best[0]
    drawn = flow_draws(best, seed=seed)
    title = f"{llm.name} on {best.placement.problem.name}: {best.flow.tokens_per_s:,.0f} tokens/s"
    options.draw(figure, force, "hetero.plots.placements:figure_of", best.flow, title=title)
    record = {
        "tokens_per_s": best.tokens_per_s,
        "bound_tokens_per_s": best.bound,
        "gap": best.gap,
        "tokens_per_s_in_draws": drawn.tolist(),
        "bottleneck": best.flow.bottleneck,
        "layers": {node.name: list(held) for _, node, held in best.placement.nodes()},
        "seconds": found.seconds,
    }
    planned = (
        f"Flow of plan 1: {middle(drawn, 'tokens/s')}; the bound is for these step times.\n"
        f"Planned in {found.seconds:.1f} s."
    )
    options.show(as_json, lambda: record, found, f"{best.flow}\n{planned}")
