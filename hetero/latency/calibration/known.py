"""What is known of each GPU of the catalog: measured, derived, estimated or assumed, and how well.

One row per GPU, made from the catalog and the tables of ``data/measured``; ``hetero gpus`` prints
it, and the documentation holds the same table.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

from hetero.catalog import Gpu, gpus
from hetero.display import Column, Table
from hetero.latency.calibration.expected import (
    LEVELS,
    StepError,
    error_of,
    expected_error,
    level_of,
)
from hetero.latency.frames import derived_frame
from hetero.latency.models.efficiencies import chip, chips_frame, fitted_frame

_TABLES = {
    "aiconfigurator_steps": "operators",
    "profile_steps": "layers",
    "splitwise_medians": "steps",
    "helix_layer_knots": "layers",
}


def gpus_table(which: Sequence[Gpu] = ()) -> Table:
    """Per GPU, by default all: what was measured on it, others' times, error and price."""
    checked = {"yes": "confirmed", "partly": "partly confirmed"}

    def error(gpu: Gpu) -> StepError:
        return expected_error(gpu.name)

    columns = (
        Column("GPU", of="name"),
        Column("data sheet", of=lambda gpu: checked.get(gpu.checked, "one source")),
        Column("measured", of=lambda gpu: _measured(gpu.name) or "nothing"),
        Column("other models", of=_other),
        Column("prefill error", "%", 2, of=lambda gpu: error(gpu).prefill_p90_percent),
        Column("decode error", "%", 2, of=lambda gpu: error(gpu).decode_p90_percent),
        Column("price", of=_price),
    )
    best = error_of("measured")
    notes = (
        "Error: nine of ten steps of other models err by less, on servers that no fit knew. Of a "
        f"model measured on the GPU it is {best.prefill_p90_percent:.1f} % of prefills and "
        f"{best.decode_p90_percent:.1f} % of decode steps, nearly all of it the engine's.",
        "Measured: operators (summed by aiconfigurator), layers (Helix, LLMServingSim), steps "
        "(Splitwise). Derived: roofline with efficiencies fitted to them. Estimated: those of "
        "another variant of the chip. Assumed: the median of every efficiency over the chips with "
        f"several models, {chips_frame()['gpu'].map(chip).nunique()}; its error, of each left out.",
        "No chip was measured in two variants: an estimated GPU is given the error of an assumed "
        "one, which overstates it.",
    )
    return Table.of("What is known of each GPU", columns, which or gpus(), *notes)


def markdown() -> str:
    """The table as Markdown, with its notes."""
    table = gpus_table()
    lines = [
        "| " + " | ".join(column.heading for column in table.columns) + " |",
        "| " + " | ".join("---" for _ in table.columns) + " |",
    ]
    lines += [
        "| " + " | ".join(c.show(cell) for c, cell in zip(table.columns, row, strict=True)) + " |"
        for row in table.rows
    ]
    return "\n".join([*lines, "", *(f"{note}\n" for note in table.notes)])


@lru_cache(maxsize=1)
def _models() -> dict[str, dict[str, set[str]]]:
    found: dict[str, dict[str, set[str]]] = {}
    for name, kind in _TABLES.items():
        for gpu, llm in derived_frame(name)[["gpu", "llm"]].itertuples(index=False, name=None):
            found.setdefault(gpu, {}).setdefault(kind, set()).add(llm)
    return found


def _measured(name: str) -> str:
    kinds = _models().get(name, {})
    if not kinds and "package" in set(fitted_frame()[fitted_frame()["gpu"] == name]["grid"]):
        return "operators"
    runs = derived_frame("offline_compute")["gpu"]
    found = [f"{kind}: {', '.join(sorted(llms))}" for kind, llms in kinds.items()]
    found += [f"servers: {row['engine']}" for row in _of_servers(name)]
    return "; ".join([*found, *["offline runs"] * (name in set(runs))])


def _of_servers(name: str) -> list[dict[Hashable, Any]]:
    """Calibrations on runs of servers."""
    rows = fitted_frame()
    rows = rows[(rows["gpu"] == name) & ~rows["grid"].isin(["published", "package"])]
    return rows.to_dict("records")


def _other(gpu: Gpu) -> str:
    level, served = level_of(gpu.name), _served(gpu.name)
    if level == "calibrated":
        return served or "derived"
    if level == "same chip":
        names = sorted({n for n in fitted_frame()["gpu"] if chip(n) == chip(gpu.name)})
        return f"estimated from {' and '.join(names)}"
    if gpu.name in set(derived_frame("offline_compute")["gpu"]):
        lent = "compute fitted to runs, the rest lent by other GPUs"
        return f"{served}; else {lent}" if served else lent
    return "assumed"


def _served(name: str) -> str:
    """What runs of servers say of it, and the mean error on models that took no part."""
    found = ""
    for row in _of_servers(name):
        only = {"release": f" under {row['engine']}", "several": "; of several GPUs"}
        error = row["decode_held_out_llm_mape_percent"]
        found += f"derived{only.get(row['grid'], '')} from runs, each model left out {error:.0f} %"
    return found


def _price(gpu: Gpu) -> str:
    if gpu.usd_per_h is None:
        return "none"
    return "assumed" if gpu.price_source.startswith("assumed") else "listed"


def levels_table() -> Table:
    """Expected errors of the kinds of sources."""
    columns = (
        Column("source", of="level"),
        Column("common to a replica, prefill", "%", 2, of=lambda e: 100.0 * e.prefill_sd),
        Column("common to a replica, decode", "%", 2, of=lambda e: 100.0 * e.decode_sd),
        Column("single steps, prefill", "%", 2, of=lambda e: 100.0 * e.prefill_scatter),
        Column("single steps, decode", "%", 2, of=lambda e: 100.0 * e.decode_scatter),
        Column("engine's part", "%", 2, of=lambda e: 100.0 * e.engine_sd),
        Column("time per request", "%", 2, of=lambda e: 100.0 * e.front_sd),
        Column("engine's part from", of="servers"),
        Column("rows"),
    )
    note = "One standard deviation of the logarithm; what is common has the engine's part in it."
    return Table.of("Expected error of step times", columns, map(error_of, LEVELS), note)
