"""What other tools call a GPU of the catalog.

``nvidia.com/gpu.product`` is the node label that NVIDIA's GPU feature discovery sets: the product
name that the driver reports, with hyphens; ``amd.com/gpu.product-name`` that of AMD's node
labeller. A GPU without a known name is asked for by a label that the operator sets.
"""

from __future__ import annotations

import re

from hetero.catalog.gpus import names_of, skypilot_names
from hetero.errors import ExportError, require

PRODUCT_LABEL, AMD_LABEL = "nvidia.com/gpu.product", "amd.com/gpu.product-name"
OWN_LABEL = "hetero/gpu"
"""Node label for GPUs whose product name is not known here."""


def node_label(gpu: str) -> tuple[str, str]:
    """Label and value of the Kubernetes nodes that have a GPU.

    Examples
    --------
    >>> node_label("L4"), node_label("X1")
    (('nvidia.com/gpu.product', 'NVIDIA-L4'), ('hetero/gpu', 'X1'))
    """
    printed = names_of(gpu)
    if amd := [name for name in printed if name.startswith("AMD_")]:
        return AMD_LABEL, amd[0]
    if printed and not printed[0].startswith("AMD"):
        return PRODUCT_LABEL, printed[0].replace(" ", "-")
    return OWN_LABEL, re.sub(r"[^A-Za-z0-9._-]+", "-", gpu)[:63].strip("-._") or "x"


def skypilot(gpu: str) -> str:
    """Name of a GPU in SkyPilot, such as A100-80GB."""
    require(
        gpu in skypilot_names(),
        f"SkyPilot's list of accelerators has no {gpu}.",
        resolve="plan without it, or export to vllm or kubernetes.",
        error=ExportError,
    )
    return skypilot_names()[gpu]
