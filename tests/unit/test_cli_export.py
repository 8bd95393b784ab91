"""``hetero export`` of a cluster: for vLLM what that runs, for any engine what it may refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from quick_cards import little

from hetero.apps.cli import main

FLEET = """
machines:
  - {name: big, gpu: A100-SXM-80GB, count: 2, usd_per_h: 3.6}
  - {name: small, gpu: L40S, count: 1, usd_per_h: 1.1}
network:
  within_region: {bandwidth_gbit_s: 25, latency_ms: 0.1}
"""


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    little(monkeypatch)


def exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], *how: str) -> tuple[int, str]:
    """Exit code of an export of the fleet, and what was printed."""
    own = tmp_path / "own.yaml"
    own.write_text(FLEET)
    asked = [str(own), "--model", "Llama-3.1-70B", "--rate", "0.3", "--slo", "ttft=5s,tpot=200ms"]
    with pytest.raises(SystemExit) as end:
        main(["export", *asked, "--to", "vllm", "-o", str(tmp_path / "files"), *how])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out + said.err


def test_the_best_plan_for_vllm_is_one_that_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = exported(tmp_path, capsys)
    assert code == 0, said
    scripts = {path.name: path.read_text() for path in (tmp_path / "files").iterdir()}
    assert sorted(scripts) == ["big.sh"]
    (line,) = [line for line in scripts["big.sh"].splitlines() if "vllm serve" in line]
    assert line.split()[0] == "CUDA_VISIBLE_DEVICES=0,1"


def test_the_best_plan_for_any_engine_is_a_pipeline_that_vllm_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = exported(tmp_path, capsys, "--engine", "any")
    assert code != 0
    assert "one tensor-parallel degree" in said
    assert "plan with --engine vllm" in said
    assert not (tmp_path / "files").exists()
