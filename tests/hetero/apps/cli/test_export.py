"""``hetero export`` of a cluster: for vLLM what that runs, for any engine what it may refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hetero.apps.cards.quick_cards import little

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


@pytest.fixture
def asked(tmp_path: Path) -> tuple[object, ...]:
    """An export of the fleet."""
    own = tmp_path / "own.yaml"
    own.write_text(FLEET)
    load = ("--model", "Llama-3.1-70B", "--rate", "0.3", "--slo", "ttft=5s,tpot=200ms")
    return "export", own, *load, "--to", "vllm", "-o", tmp_path / "files"


def test_the_best_plan_for_vllm_is_one_that_it_runs(said, asked, tmp_path: Path) -> None:
    assert said(*asked)
    scripts = {path.name: path.read_text() for path in (tmp_path / "files").iterdir()}
    assert sorted(scripts) == ["big.sh"]
    (line,) = [line for line in scripts["big.sh"].splitlines() if "vllm serve" in line]
    assert line.split()[0] == "CUDA_VISIBLE_DEVICES=0,1"


def test_no_pipeline_leaves_a_machine_that_holds_the_model(said, asked, tmp_path: Path) -> None:
    assert said(*asked, "--engine", "any")
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["big.sh"]
