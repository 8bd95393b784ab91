"""What README takes from results: what the simulator can be believed about, what sweeps found.

``python -m pipelines.docs.believed`` writes both there. The table has a row per GPU: medians over
the runs of vLLM in ``data/measured`` of the absolute difference of simulation and measurement, with
the tables that a user gets, and with every measurement of that GPU left out of all fits.
"""

from __future__ import annotations

import json
import math
import textwrap
from functools import partial

import pandas as pd

from hetero import paths
from hetero.files import writing
from pipelines.studies import calibration, servers

MARKS = "<!-- {}: begin -->", "<!-- {}: end -->"
ERRORS = "throughput", "TPOT", "TTFT"


def markdown() -> str:
    """The table, and what the claims came to."""
    lines = [
        "",
        "| on real vLLM servers | runs | throughput | TPOT | TTFT | throughput, GPU left out | "
        "TPOT, GPU left out |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for experts, name in (("", "servers"), (", mixtures of experts", "expert_servers")):
        frame = calibration.read(name)
        frame = frame[frame["server"].str.lower().str.contains("vllm")]
        frame = frame.assign(gpu=frame["gpu"] + calibration.four_bit(frame))
        found = servers.medians_frame(frame, ("gpu", "test")).set_index("gpu")
        left = found[found["test"] == "gpu"].reindex(found.index.unique()).to_dict("index")
        for gpu, own in found[found["test"] == "default"].sort_index().to_dict("index").items():
            cells = [f"{gpu}{experts}", f"{own['runs']:.0f}"]
            for test, names in ("default", ERRORS), ("gpu", ERRORS[:2]):
                row, rows = own if test == "default" else left[gpu], frame[frame["gpu"] == gpu]
                for name in names:
                    told = rows.loc[rows["test"] == test, name].count()
                    few = f" ({told})" if 0 < told < own["runs"] else ""
                    cells.append(_percent(row[name]) + few)
            lines.append(f"| {' | '.join(cells)} |")
    mixed = pd.read_csv(paths.results() / "paper" / "twin" / "13_arena" / "worlds.csv").iloc[0]
    claims = json.loads((paths.results() / "metrics.json").read_text(encoding="utf-8"))["claims"]
    tests = sum(claims.values()) - claims["not a test"]
    lines += [
        "",
        textwrap.fill(
            "Median error of the default command over public runs that others measured, and where "
            "no fit had that GPU; in brackets how many runs tell, where fewer (notebooks 12, 16). "
            f"Of {tests} published values that test something, "
            f"{claims['reproduced']} are reproduced, {claims['direction only']} in "
            f"direction only, {claims['undecided']} undecided, {claims['not reproduced']} not, "
            f"{claims['not attempted']} not attempted. "
            "Mixed fleets [carry](results/paper/twin/13_arena/pays.svg) "
            f"{mixed['mixed over homogeneous']:.2f} times what the best single GPU type does for "
            f"as much money ({mixed['low']:.2f} to {mixed['high']:.2f}; {mixed['fleets']} fleets).",
            118,
        ),
    ]
    return "\n".join(lines) + "\n"


def sweeps() -> str:
    """A sentence per sweep that ships with its results."""

    def change(name: str, measure: str, value: object, ends: bool = False) -> str:
        frame = pd.read_csv(paths.results() / "sweeps" / name / "effects.csv")
        rows = frame[frame["measure"].str.contains(measure) & (frame["value"] == value)]
        ((mean, *between),) = rows[["change", "change low", "change high"]].to_numpy()
        low, high = sorted(map(abs, between))
        told = (
            f"{abs(mean):.0f} % {'more' if mean > 0 else 'less'}" if abs(mean) >= 0.5 else "as much"
        )
        return f"{told} ({low:.0f} to {high:.0f})" if ends else told

    skew = pd.read_csv(paths.results() / "sweeps" / "skew" / "effects.csv")
    last = skew.loc[skew["measure"].str.startswith("last"), ["change low", "change high"]]
    wide = pd.read_csv(paths.results() / "sweeps" / "targets" / "effects.csv")
    carried = wide.set_index("value")["mean"]
    fleet, errs = "current-small-12 as {} Qwen2.5-14B", partial(change, "prediction")
    said = {
        "theta": "weighs KV caches in use in Algorithm 2 of Xiong et al.; 8 in place of 0 gives a "
        f"queue (all requests sent at once) {change('theta', 'NVLink, all', 8)} throughput with "
        f"NVLink and {change('theta', 'PCIe, all', 8)} by PCIe.",
        "prediction": "of output lengths that errs by 1 in the logarithm gives Algorithm 2 "
        f"{errs('2, all', 1)} throughput of a queue and our router {errs('hetero, all', 1)}, by 2 "
        f"{errs('2, all', 2)} and {errs('hetero, all', 2)}.",
        "mix": "for the same money: 7 H100 carry "
        f"{change('mix', 'goodput .requ', fleet.format('7 H100-SXM'), True)} than 4 with 8 L40S, "
        f"16 L40S {change('mix', 'goodput .requ', fleet.format('16 L40S'))}.",
        "bins": "of HeteroServe: their number K does nothing as printed; with long prompts on H100 "
        f"alone K = 2 gives {change('bins', 'variant.*throughput', 2, True)} throughput than 4.",
        "targets": "of twice the latency of a request alone: mixed fleets carry "
        f"{carried[2.0]:.2f} times what the best type does, with eight times {carried[8.0]:.2f}.",
        "skew": "of the first islands changes what a search ends with by at most "
        f"{math.ceil(last.abs().max().max())} %.",
    }
    return "".join(
        textwrap.fill(
            f"- [{name}](results/sweeps/{name}/effects.svg) {text}", 118, subsequent_indent="  "
        )
        + "\n"
        for name, text in said.items()
    )


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f} %"


def readme() -> str:
    """The README with both put between their marks."""
    text = (paths.root() / "README.md").read_text(encoding="utf-8")
    for name, own in (("believed", markdown()), ("sweeps", sweeps())):
        begin, end = (mark.format(name) for mark in MARKS)
        before, _, rest = text.partition(f"{begin}\n")
        text = f"{before}{begin}\n{own}{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    """Put both into the README."""
    text = readme()
    with writing(paths.root() / "README.md", force=True) as part:
        part.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
