"""How long a batch takes: fits, measured tables and the roofline, all as one step model."""

from hetero.latency.affine import Affine, fit
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import Measurements, read_csv

__all__ = ["Affine", "Measurements", "Piece", "StepModel", "fit", "read_csv"]
