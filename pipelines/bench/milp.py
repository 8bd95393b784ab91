"""Helix's integer program solved here: objective and bound over time, for its Fig. 12."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from hetero import paths
from hetero.display import Column, Table
from hetero.files import writing
from hetero.planners.helix.heuristics import petals, swarm
from hetero.planners.helix.milp import Milp
from hetero.programs import SolverLimits
from hetero.timings import Timing
from pipelines.bench.measured import Measured, Say, silent
from pipelines.studies.helix_artifact import problem
from pipelines.studies.layer_placement import milp_frame, milp_links

#: By setting the heuristic that the program starts from, as the artifact's runs have it.
STARTS = {"small-10 30B": None, "single-24 70B": petals, "geo-24 70B": swarm}
_LINE = re.compile(r"#\w+ +([\d.]+)s +best:(\S+) +next:\[(?:[^,]*,([^\]]*))?\]")


@dataclass(frozen=True, slots=True, repr=False)
class Searches(Measured):
    """What every solve knew and when: ``data/measured/helix_milp.csv``."""

    rows: pd.DataFrame

    def table(self) -> Table:
        """One row per change of objective or bound."""
        names = ("setting", "start", "seconds", "tokens_per_s", "bound", "machine", "date")
        columns = [Column(name, of=name) for name in names]
        return Table.of("Helix's program by CP-SAT", columns, self.rows.itertuples())

    def record(self) -> list[dict[str, Any]]:
        """The same as JSON values."""
        return self.rows.to_dict("records")  # type: ignore[return-value]

    def keep(self) -> None:
        """Write them in place of those of the same settings."""
        known = milp_frame()
        others = known[~known["setting"].isin(self.rows["setting"])]
        with writing(paths.data("measured", "helix_milp.csv"), force=True) as part:
            pd.concat([others, self.rows]).to_csv(part, index=False, lineterminator="\n")


def milp(
    *, seconds: float = 240.0, workers: int = 2, again: bool = False,
    record: bool = False, progress: Say = silent,
) -> Searches:  # fmt: skip
    """Solve every setting, those that are recorded only if ``again``; keep each that is done."""
    found = []
    for setting in STARTS:
        kept = milp_frame().query("setting == @setting")
        if again or kept.empty:
            progress(setting)
            kept = _solved(setting, SolverLimits(seconds=seconds, threads=workers))
            if record:
                Searches(kept).keep()
        found.append(kept)
    return Searches(pd.concat(found))


def _solved(setting: str, limits: SolverLimits) -> pd.DataFrame:
    case, heuristic = problem(*setting.split()), STARTS[setting]
    rows: list[tuple[float, float, float]] = []

    def log(lines: Sequence[str]) -> None:
        for found in filter(None, map(_LINE.match, lines)):
            time_s, best, bound = (float((t or found[2]).replace("'", "")) for t in found.groups())
            rows.append((time_s, max(best, 0.0), bound))

    program, began = Milp(case, links=milp_links(case), whole=True), time.perf_counter()
    start = heuristic(case) if heuristic else None
    result = program.solve(limits, solver="cp_sat", start=start, log=log)
    rows.append((time.perf_counter() - began, result.tokens_per_s, result.bound))
    frame = pd.DataFrame(rows, columns=["seconds", "tokens_per_s", "bound"]).round(2)
    frame.insert(0, "setting", setting)
    frame.insert(1, "start", heuristic.__name__ if heuristic else "none")
    held = " ".join(f"{node.name}:{a}-{b}" for _, node, (a, b) in result.placement.nodes())
    command = f"hetero bench milp --record seconds={limits.seconds:g} workers={limits.threads}"
    here = Timing.here("milp", rows[-1][0], command=command)
    frame = frame.assign(layers="", command=command, machine=here.machine, date=here.date)
    frame.loc[len(frame) - 1, "layers"] = held
    return frame
