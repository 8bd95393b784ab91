"""Layers placed on the nodes of a network: what a placement carries, found as a maximum flow.

Read in this order: :mod:`machines` (what one node can hold and how fast it is), :mod:`throughput`
(tokens per second over the number of layers held), :mod:`problem` (nodes and links),
:mod:`placement` (which node holds which layers), :mod:`network` (the flow network and its maximum
flow), :mod:`pruning` (which links Helix keeps).
"""

from hetero.placement.links import Links
from hetero.placement.machines import MachineKind, machine_kind, machine_kinds
from hetero.placement.network import Flow, FlowNetwork, Path
from hetero.placement.placement import LayerRange, Placement
from hetero.placement.problem import Node, Problem

__all__ = [
    "Flow",
    "FlowNetwork",
    "LayerRange",
    "Links",
    "MachineKind",
    "Node",
    "Path",
    "Placement",
    "Problem",
    "machine_kind",
    "machine_kinds",
]
