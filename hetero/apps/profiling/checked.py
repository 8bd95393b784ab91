"""Fresh rounds against what a fit expects of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetero import latency
from hetero.display import Column, Shown, Table
from hetero.latency.accuracy import Accuracy
from hetero.latency.step import StepModel
from hetero.latency.tables import PHASES, Measurements, Phase


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Checked(Shown):
    """How well a step model expected rounds that it was not fitted to.

    Attributes
    ----------
    rows
        What was measured.
    step
        What expected it.
    accuracy
        Per phase.
    """

    rows: Measurements
    step: StepModel
    accuracy: dict[Phase, Accuracy]

    def table(self) -> Table:
        """One row per phase."""
        columns = (
            Column("phase", of=lambda item: item[0]),
            Column("rounds", of=lambda item: item[1].rows),
            Column("mean error (MAPE)", "%", 3, of=lambda item: item[1].mape_percent),
            Column("bias", "%", 3, of=lambda item: item[1].bias_percent),
            Column("largest error", "%", 3, of=lambda item: item[1].max_percent),
        )
        note = "Settings between and beside the measured ones; none of them was fitted."
        return Table.of("Check on fresh rounds", columns, self.accuracy.items(), note)


def checked(path: Path | str, step: StepModel) -> Checked:
    """Compare the rounds that a profile kept for a check with a step model.

    Raises
    ------
    DataError
        If the file holds none.
    """
    rows = latency.read_csv(path, kept_for="check")
    accuracy: dict[Phase, Accuracy] = {}
    for phase in PHASES:
        part = rows.phase(phase)
        if len(part.batch):
            accuracy[phase] = Accuracy.of(step.seconds(*part.step_arguments), part.seconds)
    return Checked(rows, step, accuracy)
