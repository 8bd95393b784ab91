"""What is known of each GPU: one row each, in the shell and in the documentation."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd

from hetero import paths
from hetero.catalog import gpus
from hetero.latency.calibration import known
from hetero.latency.calibration.expected import expected_error
from pipelines.docs import build


def test_every_gpu_has_a_row_with_its_error() -> None:
    rows = {row[0]: row for row in known.gpus_table().rows}
    assert list(rows) == [gpu.name for gpu in gpus()]
    for name, row in rows.items():
        assert row[5] == expected_error(name).decode_p90_percent


def test_rows_say_what_the_tables_hold() -> None:
    rows = {row[0]: row for row in known.gpus_table().rows}
    assert rows["T4"][2] == "layers: LLaMA-1-30B, Llama-2-70B"
    assert "steps: BLOOM-176B, Llama-2-70B" in rows["H100-SXM"][2]
    assert rows["RTX-4090"][2] == "layers: Llama-3.1-8B; servers: vllm 0.8.5"
    assert rows["H800-SXM"][3] == "estimated from H100-SXM"
    assert rows["A40"][2:4] == ("nothing", "assumed")
    assert rows["B300-SXM"][2:4] == rows["Arc-Pro-B60"][2:4] == ("operators", "derived")
    assert rows["MI325X"][2] == "offline runs"
    assert rows["MI325X"][3] == "compute fitted to runs, the rest lent by other GPUs"
    assert rows["H800-SXM"][6] == "assumed"
    assert rows["A800-SXM-80GB"][6] == "none"


def test_gpus_of_runs_of_servers_are_not_assumed() -> None:
    frame = pd.read_csv(paths.data("measured", "efficiencies.csv"))
    own = frame[~frame["grid"].isin(["published", "package"])].set_index("gpu")
    rows = {row[0]: row[2:4] for row in known.gpus_table().rows}
    for name, error in own["decode_held_out_llm_mape_percent"].items():
        measured, other = rows[str(name)]
        assert f"servers: {own['engine'][name]}" in measured
        assert f"each model left out {error:.0f} %" in other
        assert "assumed" not in other
    runs = pd.read_csv(paths.data("measured", "servers_held_out.csv"))
    assert not [name for name in set(runs["gpu"].dropna()) if rows[name][1] == "assumed"]


def test_the_command_prints_it() -> None:
    code = "from hetero.apps.cli import main; main(['gpus', '--markdown'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.root()
    )
    assert done.stdout == known.markdown()
    assert known.markdown() in build.gpus()
