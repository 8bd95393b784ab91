"""What other tools call a GPU of the catalog.

``nvidia.com/gpu.product`` is the node label that NVIDIA's GPU feature discovery sets: the product
name that the driver reports, with hyphens; ``amd.com/gpu.product-name`` that of AMD's node
labeller. SkyPilot has short names of its own. A GPU without a known name is asked for by a label
that the operator sets.
"""

from __future__ import annotations

import re

from hetero.errors import ExportError

PRODUCT_LABEL, AMD_LABEL = "nvidia.com/gpu.product", "amd.com/gpu.product-name"
OWN_LABEL = "hetero/gpu"
"""Node label for GPUs whose product name is not known here."""

# Product name and name in SkyPilot, None where it is not known.
_NAMES = {
    "A100-SXM-80GB": ("NVIDIA-A100-SXM4-80GB", "A100-80GB"),
    "A100-SXM-40GB": ("NVIDIA-A100-SXM4-40GB", "A100"),
    "A100-PCIE-80GB": ("NVIDIA-A100-80GB-PCIe", "A100-80GB"),
    "A800-SXM-80GB": ("NVIDIA-A800-SXM4-80GB", None),
    "H100-SXM": ("NVIDIA-H100-80GB-HBM3", "H100"),
    "H100-PCIE-80GB": ("NVIDIA-H100-PCIe", None),
    "H100-NVL": ("NVIDIA-H100-NVL", None),
    "H200-SXM": ("NVIDIA-H200", "H200"),
    "H20": ("NVIDIA-H20", None),
    "L40S": ("NVIDIA-L40S", "L40S"),
    "L40": ("NVIDIA-L40", "L40"),
    "L20": ("NVIDIA-L20", None),
    "L4": ("NVIDIA-L4", "L4"),
    "T4": ("Tesla-T4", "T4"),
    "V100-SXM2-32GB": ("Tesla-V100-SXM2-32GB", "V100-32GB"),
    "V100-SXM2-16GB": ("Tesla-V100-SXM2-16GB", "V100"),
    "A40": ("NVIDIA-A40", "A40"),
    "A30": ("NVIDIA-A30", "A30"),
    "A10": ("NVIDIA-A10", "A10"),
    "A10G": ("NVIDIA-A10G", "A10G"),
    "RTX-A6000": ("NVIDIA-RTX-A6000", "A6000"),
    "RTX-A5000": ("NVIDIA-RTX-A5000", "A5000"),
    "B200-SXM": ("NVIDIA-B200", "B200"),
    "GB200": ("NVIDIA-GB200", "GB200"),
    "GB300": ("NVIDIA-GB300", "GB300"),
    "RTX-3090": ("NVIDIA-GeForce-RTX-3090", None),
    "RTX-3090Ti": ("NVIDIA-GeForce-RTX-3090-Ti", None),
    "RTX-4090": ("NVIDIA-GeForce-RTX-4090", None),
    "RTX-5090": ("NVIDIA-GeForce-RTX-5090", None),
    "MI300X": ("AMD_Instinct_MI300X_OAM", "MI300X"),
    "GH200-96GB": (None, "GH200"),
    "B300-SXM": (None, "B300"),
    "RTX-6000-Ada": (None, "RTX6000-Ada"),
    "V100-16GB": (None, "V100"),
}
_UNKNOWN = (None, None)


def node_label(gpu: str) -> tuple[str, str]:
    """Label and value of the Kubernetes nodes that have a GPU.

    Examples
    --------
    >>> node_label("L4"), node_label("X1")
    (('nvidia.com/gpu.product', 'NVIDIA-L4'), ('hetero/gpu', 'X1'))
    """
    product, _ = _NAMES.get(gpu, _UNKNOWN)
    if product is not None:
        return AMD_LABEL if product.startswith("AMD_") else PRODUCT_LABEL, product
    return OWN_LABEL, re.sub(r"[^A-Za-z0-9._-]+", "-", gpu)[:63].strip("-._") or "x"


def skypilot(gpu: str) -> str:
    """Name of a GPU in SkyPilot.

    Raises
    ------
    ExportError
        If SkyPilot has no name for it.

    Examples
    --------
    >>> skypilot("A100-SXM-80GB")
    'A100-80GB'
    """
    _, name = _NAMES.get(gpu, _UNKNOWN)
    if name is None:
        raise ExportError(
            f"SkyPilot's list of accelerators has no {gpu}.",
            resolve="plan without it, or export to vllm or kubernetes.",
        )
    return name
