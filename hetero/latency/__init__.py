"""How long a batch takes: fits, measured tables and the roofline, all as one step model.

Read :mod:`~hetero.latency.step` first: everything else reduces to its ``StepModel``; then
:mod:`~hetero.latency.resolve`, which chooses among them for every command and planner.

=================  ==============================================================================
affine, phase,     Xiong et al. eq. 3-4: the eight coefficients, their fit and what data determine
floor, fitting
roofline           times from the spec sheet with explicit efficiencies
moe, moe_costs,    Rignall's analytic model of mixtures of experts; its GPUs, its quirks as
moe_devices,       switches, and its step models
moe_oddities,
moe_reduction
measured, layers,  Splitwise, aiconfigurator and Helix, published or reduced; a user's own CSV
tables
reduction          step models made from other models or rows, with their error
efficiencies       roofline efficiencies as committed, and the roofline of any GPU with them
calibration        their fit to measured tables
profiles           times per operator of one layer reduced to replicas, ragged and mixed steps
                   included
expected, known    the error to expect of every GPU, and what is known of it
=================  ==============================================================================

Examples
--------
>>> from hetero.catalog import gpu, llm
>>> from hetero.latency import for_gpu
>>> step = for_gpu(gpu("H100-SXM"), llm("Llama-3.1-70B"), tensor_parallel=4).step_model()
>>> bool(step.decode_seconds([1024] * 64) < 2 * step.decode_seconds([1024]))
True
"""

from hetero.latency.models.affine import Affine, fit
from hetero.latency.models.efficiencies import for_gpu
from hetero.latency.models.roofline import Efficiency, Roofline
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import Measurements, read_csv

__all__ = [
    "Affine",
    "Efficiency",
    "Measurements",
    "Piece",
    "Roofline",
    "StepModel",
    "fit",
    "for_gpu",
    "read_csv",
]
