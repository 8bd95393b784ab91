"""What is known of each GPU: one row each, in the shell and in the documentation."""

from __future__ import annotations

import math
import subprocess
import sys

import pandas as pd

from hetero import paths
from hetero.catalog import gpus
from hetero.latency.calibration import known
from hetero.latency.calibration.expected import expected_error
from pipelines.docs import build


def test_every_gpu_has_a_row_with_its_error() -> None:
    rows = {row[0]: row for row in known.known().rows}
    assert list(rows) == [gpu.name for gpu in gpus()]
    for name, row in rows.items():
        assert row[5] == expected_error(name).decode_p90_percent


def test_rows_say_what_the_tables_hold() -> None:
    rows = {row[0]: row for row in known.known().rows}
    assert rows["T4"][2] == "layers: LLaMA-1-30B, Llama-2-70B"
    assert "steps: BLOOM-176B, Llama-2-70B" in rows["H100-SXM"][2]
    assert rows["RTX-4090"][2] == "layers: Llama-3.1-8B"
    assert rows["H800-SXM"][3] == "estimated from H100-SXM"
    assert rows["A40"][2:4] == ("nothing", "assumed")
    assert rows["B300-SXM"][2:4] == rows["Arc-Pro-B60"][2:4] == ("operators", "derived")
    assert rows["MI325X"][2:4] == ("offline runs", "compute fitted to runs, the rest assumed")
    assert rows["H800-SXM"][6] == "assumed"
    assert rows["A800-SXM-80GB"][6] == "none"


def test_assumed_steps_are_set_against_runs_of_servers() -> None:
    frame = pd.read_csv(paths.data("measured", "servers_held_out.csv"))
    rows = {row[0]: row[3] for row in known.known().rows}
    for name in ("A10G", "Gaudi2", "MI300X", "RTX-4090"):
        own = frame[(frame["gpu"] == name) & (frame["level"] == "carried")]
        steps = own[own["test"].isin(["gpu", "unfitted"])]["step"]
        said = f"assumed, and {math.exp(steps.median()):.2f} times as long in {len(steps)} runs of"
        assert said in rows[name]
    assert sum("times as long" in one for one in rows.values()) == 4


def test_the_command_prints_it() -> None:
    code = "from hetero.apps.cli import main; main(['gpus', '--markdown'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.root()
    )
    assert done.stdout == known.markdown()
    assert known.markdown() in build.gpus()
