"""The diagrams of the five papers, redrawn: what they say, in drawings of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hetero import paths
from pipelines.docs import planning_diagrams as planning
from pipelines.docs import routing_diagrams as routing
from pipelines.docs.sheet import Sheet
from pipelines.studies.coverage import DRAWINGS, drawing_name

DIAGRAMS: Mapping[str, Callable[[], Sheet]] = MappingProxyType(
    {
        "xiong/Fig. 1": routing.xiong_architecture,
        "xiong/Fig. 2": routing.xiong_phases,
        "xiong/Fig. 3": routing.xiong_scheduler,
        "heteroserve/Fig. 1": routing.heteroserve_architecture,
        "heteroserve/Fig. 2": routing.heteroserve_strategies,
        "rignall/Fig. 4.1": planning.rignall_service,
        "rignall/Fig. 4.5": planning.rignall_loops,
        "rignall/Fig. 4.6": planning.rignall_inner,
        "rignall/Fig. 4.7": planning.rignall_outer,
        "helix/Fig. 3": planning.helix_overview,
        "thunderserve/Fig. 3": planning.thunderserve_workflow,
        "thunderserve/Fig. 4": planning.thunderserve_moves,
        "thunderserve/Fig. 15": planning.thunderserve_overview,
        "thunderserve/Fig. 16": planning.thunderserve_networks,
    }
)
"""Makers of the drawings, by the names that ``hetero figures`` gives the diagrams."""


def drawings() -> dict[str, str]:
    """SVG text by file name.

    Examples
    --------
    >>> sorted(drawings())[0]
    'helix-fig-3.svg'
    """
    return {drawing_name(key): make().svg() for key, make in DIAGRAMS.items()}


def main() -> None:
    """Write every drawing into the folder that ``hetero figures`` looks into."""
    folder = paths.root() / DRAWINGS
    folder.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
