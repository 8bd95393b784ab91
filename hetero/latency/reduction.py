"""A step model made from other latency models or from rows, with the error this costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.latency.accuracy import Accuracy
from hetero.latency.step import Bends, Piece, StepModel
from hetero.latency.tables import Phase


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reduction(Shown):
    """A step model and how far it lies from what it stands for.

    Attributes
    ----------
    model
        The step model.
    accuracy
        Per phase, error of the step model against the rows or the model it was made from.
    note
        What the step model cannot carry, in words.
    """

    model: StepModel
    accuracy: dict[Phase, Accuracy]
    note: str = ""

    def table(self) -> Table:
        """Error of the reduction per phase."""
        columns = (
            Column("phase", of=lambda item: item[0]),
            Column("rows", of=lambda item: item[1].rows),
            Column("mean error", "%", 3, of=lambda item: item[1].mape_percent),
            Column("bias", "%", 3, of=lambda item: item[1].bias_percent),
            Column("largest error", "%", 3, of=lambda item: item[1].max_percent),
        )
        title = f"Reduction to a step model: {self.model.source}"
        return Table.of(title, columns, self.accuracy.items(), self.note)


def with_bends(piece: Piece, batches: Floats, contexts: Floats, extra_s: Floats) -> Piece:
    """The piece with bends whose extra times, at least 0, are known at some batches.

    Between batches they are linear, as far as no step gets shorter with more cached tokens.

    Parameters
    ----------
    batches
        Shape (R,), increasing.
    contexts
        Shape (K,) [tokens].
    extra_s
        Shape (R, K); on top of the piece [s].
    """
    sizes = np.arange(1.0, len(piece.per_cached_token_s) + 1.0)
    columns = [np.interp(sizes, batches, column) for column in extra_s.T]
    line = piece.per_cached_token_s[:, None] * sizes[:, None] * contexts
    whole = np.maximum.accumulate(np.column_stack(columns) + line, axis=1)
    return replace(piece, bends=Bends(contexts, np.maximum(whole - line, 0.0)))
