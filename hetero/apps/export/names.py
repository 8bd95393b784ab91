"""What other tools call a GPU of the catalog.

``nvidia.com/gpu.product`` is the node label that NVIDIA's GPU feature discovery sets: the product
name that the driver reports, with hyphens; ``amd.com/gpu.product-name`` that of AMD's node
labeller. SkyPilot has short names of its own. A GPU without a known name is asked for by a label
that the operator sets.
"""

from __future__ import annotations

import re

from hetero.catalog.gpus import names_of
from hetero.errors import ExportError

PRODUCT_LABEL, AMD_LABEL = "nvidia.com/gpu.product", "amd.com/gpu.product-name"
OWN_LABEL = "hetero/gpu"
"""Node label for GPUs whose product name is not known here."""

_SKYPILOT = {
    "A100-SXM-80GB": "A100-80GB",
    "A100-PCIE-80GB": "A100-80GB",
    "V100-SXM2-32GB": "V100-32GB",
    "V100-PCIE-32GB": "V100-32GB",
    "RTX-A6000": "A6000",
    "RTX-A5000": "A5000",
    "RTX-6000-Ada": "RTX6000-Ada",
    "RTX-3090": "RTX3090",
    "RTX-4090": "RTX4090",
    "RTX-5090": "RTX5090",
    "RTX-PRO-6000-Server": "RTXPRO6000",
}
# Others have the first part of their name, and the forms of these are not told apart.
_FIRST = (
    *("A100-SXM-40GB", "A100-PCIE-40GB", "V100-SXM2-16GB", "V100-16GB", "GH200-96GB", "H100-SXM"),
    *("H200-SXM", "B200-SXM", "B300-SXM", "L40S", "L40", "L4", "T4", "A40", "A30", "A10", "A10G"),
    *("GB200", "GB300", "MI300X"),
)


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
    """Name of a GPU in SkyPilot.

    Examples
    --------
    >>> skypilot("A100-SXM-80GB")
    'A100-80GB'
    """
    name = _SKYPILOT.get(gpu) or (gpu.partition("-")[0] if gpu in _FIRST else None)
    if name is None:
        raise ExportError(
            f"SkyPilot's list of accelerators has no {gpu}.",
            resolve="plan without it, or export to vllm or kubernetes.",
        )
    return name
