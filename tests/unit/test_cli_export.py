"""``hetero export`` of a cluster whose best plan the target cannot express."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.apps.cli import main

FLEET = """
machines:
  - {name: big, gpu: A100-SXM-80GB, count: 2, usd_per_h: 3.6}
  - {name: small, gpu: L40S, count: 1, usd_per_h: 1.1}
network:
  within_region: {bandwidth_gbit_s: 25, latency_ms: 0.1}
"""


def test_the_best_plan_that_can_be_expressed_is_taken_and_the_reason_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(FLEET)
    # The best plan is a pipeline of two GPUs and one, which vLLM cannot divide so.
    asked = [str(own), "--model", "Llama-3.1-70B", "--rate", "0.3", "--slo", "ttft=5s,tpot=200ms"]
    with pytest.raises(SystemExit) as end:
        main(["export", *asked, "--to", "vllm", "-o", str(tmp_path / "files")])
    said = capsys.readouterr()
    assert not end.value.code, said.err
    assert "The best plan carries" in said.out
    assert "Exported instead: " in said.out
    scripts = {path.name: path.read_text() for path in (tmp_path / "files").iterdir()}
    assert sorted(scripts) == ["big.sh"]
    (line,) = [line for line in scripts["big.sh"].splitlines() if "vllm serve" in line]
    assert line.split()[0] == "CUDA_VISIBLE_DEVICES=0,1"
