"""Power and energy of a plan, an estimate from data sheets.

While its GPUs are busy, as at the goodput, a plan draws a share of the sum of their power limits,
and its energy per token is that power over the tokens per second. The share is what
Argonne's LLM-Inference-Bench measured with nvidia-smi on A100-SXM (400 W) and H100-SXM (700 W) that
serve batches of 16 to 64 under vLLM, TensorRT-LLM and DeepSpeed-MII: 30 runs, file
``argonne_power.csv`` of the data set ``serving_runs``. Hosts, networks, cooling and what GPUs draw
while they idle are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hetero.apps.cards.card import PlanCard
from hetero.catalog import Gpu
from hetero.display import Table
from hetero.errors import require

SHARES: Final = (0.58, 0.73, 0.95)
"""Of the power limit, that a busy GPU draws: least, median and largest of the runs measured."""


def power(card: PlanCard, gpus: Mapping[str, Gpu]) -> Table:
    """Power of a plan's GPUs while they are busy, and energy per token at its goodput."""
    limit_w = 0.0
    for one in card.groups:
        for name, count in one.gpus.items():
            tdp_w = gpus[name].tdp_w
            require(
                tdp_w is not None,
                f"The data sheet of {name} gives no power limit.",
                resolve="give its tdp_w in the cluster file, or leave out --power.",
            )
            limit_w += one.count * count * (tdp_w or 0.0)
    per_request = 1.0 / card.served["requests_per_s"].value
    output_tps, total_tps = (
        card.goodput_rps.value * per_request * card.served[name].value
        for name in ("output_tps", "total_tps")
    )
    low_w, busy_w, high_w = (share * limit_w for share in SHARES)
    rows = [
        ("power limits of its GPUs", limit_w, "W"),
        ("power while they are busy", busy_w, "W"),
        ("energy at the goodput", busy_w / total_tps, "J per token"),
        ("energy at the goodput", busy_w / output_tps, "J per output token"),
    ]
    notes = (
        f"An estimate: busy GPUs draw {100 * SHARES[0]:.0f} to {100 * SHARES[2]:.0f} % of their "
        f"power limit ({low_w:,.0f} to {high_w:,.0f} W), {100 * SHARES[1]:.0f} % at median of 30 "
        "public runs on A100 and H100.",
        "Of the GPUs alone, without hosts, networks and cooling; below the goodput GPUs idle, and "
        "a token takes more.",
    )
    return Table.figures("Power", *rows, notes=notes)
