"""``hetero export`` of a cluster whose best plan the target cannot express."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.apps.cli import main

FLEET = """
machines:
  - {name: big, gpu: A100-SXM-80GB, count: 2, usd_per_h: 3.6}
  - {name: small, gpu: L40S, count: 4, usd_per_h: 4.4}
network:
  within_region: {bandwidth_gbit_s: 25, latency_ms: 0.1}
"""


def test_the_best_plan_that_can_be_expressed_is_taken_and_the_reason_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(FLEET)
    asked = [str(own), "--model", "Llama-3.1-8B", "--rate", "10", "--to", "vllm"]
    with pytest.raises(SystemExit) as end:
        main(["export", *asked, "-o", str(tmp_path / "files")])
    said = capsys.readouterr()
    assert not end.value.code, said.err
    assert "The best plan carries" in said.out
    assert "Exported instead: " in said.out
    scripts = {path.name: path.read_text() for path in (tmp_path / "files").iterdir()}
    assert sorted(scripts) == ["big.sh", "small.sh"]
    # Two A100 and four L40S, each GPU once.
    for name, gpus in (("big.sh", 2), ("small.sh", 4)):
        lines = [line for line in scripts[name].splitlines() if "vllm serve" in line]
        used = sorted(g for line in lines for g in line.split()[0].partition("=")[2].split(","))
        assert used == [str(k) for k in range(gpus)]
