"""What the simulator can be believed about, as the README has it.

``python -m pipelines.docs.believed`` writes it there. One row per GPU that others measured vLLM on.
Errors are medians over the runs of ``data/measured`` of the absolute difference between simulation
and measurement, with the tables that a user gets, and with every measurement of that GPU left out
of all fits.
"""

from __future__ import annotations

import json
import math
from typing import TypeAlias

from hetero import paths
from hetero.files import writing
from pipelines.studies import calibration, servers

BEGIN, END = "<!-- believed: begin -->", "<!-- believed: end -->"
_TABLES = {"dense": "servers", "experts": "expert_servers"}
_QUANTITIES = ("throughput", "TPOT", "TTFT")


Place: TypeAlias = tuple[str, str, str]
"""Kind of models, GPU, and what was left out of the fits."""


def errors() -> dict[Place, dict[str, float]]:
    """Median error [%] of each quantity, and the number of runs."""
    errors: dict[Place, dict[str, float]] = {}
    for kind, name in _TABLES.items():
        frame = calibration.read(name)
        frame = frame[frame["server"].str.lower().str.contains("vllm")]
        errors |= {
            (kind, str(row["gpu"]), str(row["test"])): {
                name: float(row[name]) for name in ("runs", *_QUANTITIES)
            }
            for row in servers.medians_frame(frame, ("gpu", "test")).to_dict("records")
        }
    return errors


def markdown() -> str:
    """The table and what the claims came to, between the marks that the README has."""
    found = errors()
    lines = [
        BEGIN,
        "",
        "| on real vLLM servers | runs | throughput | TPOT | TTFT | throughput, GPU left out | "
        "TPOT, GPU left out |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (kind, gpu, test), own in sorted(found.items()):
        if test != "default":
            continue
        left = found.get((kind, gpu, "gpu"), {})
        experts = ", mixtures of experts" if kind == "experts" else ""
        cells = [f"{gpu}{experts}", f"{own['runs']:.0f}"]
        cells += [_percent(own[name]) for name in _QUANTITIES]
        cells += [_percent(left.get(name, math.nan)) for name in _QUANTITIES[:2]]
        lines.append(f"| {' | '.join(cells)} |")
    claims = json.loads((paths.results() / "metrics.json").read_text(encoding="utf-8"))["claims"]
    tests = sum(claims.values()) - claims["not a test"]
    lines += [
        "",
        "Median error of the default command over public runs that others measured, and with every",
        "measurement of that GPU left out of all fits; notebooks 12 and 16 have each run. Of "
        f"{tests} published",
        f"values that test something, {claims['reproduced']} are reproduced, "
        f"{claims['direction only']} in direction only, {claims['undecided']} undecided, "
        f"{claims['not reproduced']} not,",
        f"{claims['not attempted']} not attempted.",
        END,
    ]
    return "\n".join(lines) + "\n"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f} %"


def main() -> None:
    """Put the table into the README."""
    path = paths.root() / "README.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(f"{END}\n")
    with writing(path, force=True) as part:
        part.write_text(before + markdown() + after, encoding="utf-8")


if __name__ == "__main__":
    main()
