"""``hetero reschedule`` as a person calls it."""

from __future__ import annotations

import pytest

FLEET = """
name: my-cloud
machines:
  - {name: big, gpu: A40, count: 4, copies: 2, usd_per_h: 1.9}
  - {name: fast, gpu: RTX-3090Ti, count: 4, copies: 2, usd_per_h: 1.4}
network:
  within_region: {bandwidth_gbit_s: 25, latency_ms: 0.2}
"""
SHORT = ["--model", "LLaMA-1-13B", "--rate", "2", "--requests", "120", "--at", "20"]
SHORT += ["--search-s", "5", "--steps", "3", "--max-stages", "2"]


def test_own_instances_a_budget_two_targets_and_a_lost_instance(tmp_path, told, refused) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    words = ["--slo", "ttft=4s,e2e=60s", "--budget", "5.5", "--lose", "big-1"]
    found = told("reschedule", fleet, *SHORT, *words)
    assert found["usd_per_h"] <= 5.5
    assert found["what"] == "big-1 fails"
    served = [one for one in found["policies"] if "error" not in one]
    assert served
    for one in served:
        assert one["lost"] == 0
        assert one["usd_per_mtok"] > 0
    for one in found["policies"]:
        assert "error" not in one or "Resolve:" in one["error"]
    words = ["--slo", "ttft=4s,e2e=60s", "--budget", "2", "--lose", "fast-2"]
    err = refused("reschedule", fleet, *SHORT, *words)
    assert "fast-2 is not among those that 2 $/h rent" in err


def test_tables_say_what_happens_and_what_it_costs(tmp_path, said) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    slow = ("--slow", "big-1,fast-1=0.1", "--policies", "none,light")
    out = said("reschedule", fleet, *SHORT, *slow)
    assert "the link between big-1 and fast-1 drops to 0.1" in out
    assert "Rescheduling: light" in out
    assert "lost" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "None of --lose, --lose-gpu, --slow and --shift given"),
        (("--lose", "a40", "--slow", "a40,3090ti=0.5"), "2 of --lose"),
        (("--lose", "nobody"), "no machine 'nobody'"),
        (("--slow", "a40"), "--slow cannot read"),
        (("--lose", "a40", "--policies", "all"), "--policies does not know 'all'"),
        (("--lose", "a40", "--rate", "0"), "--rate is 0"),
    ],
)
def test_errors_are_one_sentence(run, words: tuple[str, ...], said: str) -> None:
    short = SHORT[:2] if "--rate" in words else SHORT
    code, out, err = run("reschedule", "thunderserve-a40-3090ti-40gbit", *short, *words)
    assert code == 1
    assert out == ""
    assert said in err
    assert "Resolve:" in err
