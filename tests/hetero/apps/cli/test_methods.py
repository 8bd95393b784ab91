"""Plans of one method, and a service that changes, as a person asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

ISLANDS = ("H200=16", "H20=32", "--powers", "--trace", "azure2023_code")


def test_a_plan_with_bound_cost_and_picture(said, told, refused, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    prices = ("--price", "H200=4", "--price", "H20=1")
    out = said("plan", "islands", *ISLANDS, *prices, "--figure", picture)
    assert "proven" in out
    assert "$/h" in out
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "--force" in refused("plan", "islands", *ISLANDS, "--figure", picture)
    plan = told("plan", "islands", *ISLANDS, *prices)
    assert plan["status"] == "optimal"
    assert plan["served_rps"] <= plan["bound_rps"] * (1 + 1e-9)
    used = {"H200-SXM": 0, "H20": 0}
    for group in plan["groups"]:
        used[group["gpu"]] += group["islands"] * group["gpus_per_island"]
    assert used["H200-SXM"] <= 16
    assert used["H20"] <= 32
    assert plan["usd_per_h"] == pytest.approx(4 * used["H200-SXM"] + used["H20"])
    # Both phases carry the whole load.
    for phase in ("prefill", "decode"):
        rates = [g["requests_per_s"] for g in plan["groups"] if g["phase"] == phase]
        assert sum(map(sum, rates)) == pytest.approx(plan["served_rps"], rel=1e-5)


FLEET_FILE = """
gpus:
  X1: {mem_gib: 144, mem_bw_gbs: 5200, fp16_tflops: 700, fp8_tflops: 1400, usd_per_h: 2}
machines:
  - {name: a, gpu: X1, count: 8, copies: 2}
  - {name: b, gpu: H20, count: 8, copies: 2, usd_per_h: 9.6}
"""


def test_a_cluster_file_brings_gpus_of_its_own_and_prices(said, told, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET_FILE)
    rest = ("--powers", "--trace", "azure2023_code")
    plan = told("plan", "islands", file, *rest)
    used = dict.fromkeys(("X1", "H20"), 0)
    for group in plan["groups"]:
        used[group["gpu"]] += group["islands"] * group["gpus_per_island"]
    assert used == {"X1": 16, "H20": 16}
    assert plan["usd_per_h"] == pytest.approx(16 * 2 + 2 * 9.6)
    # An option prevails over the file, and a type without price leaves the cost open.
    dearer = told("plan", "islands", file, *rest, "--price", "X1=3")
    assert dearer["usd_per_h"] == pytest.approx(16 * 3 + 2 * 9.6)
    assert "no price is given for B300-SXM" in said("plan", "islands", file, "B300=2", *rest)


def test_a_budget_and_a_load(said, told) -> None:
    prices = ("--price", "H200=4", "--price", "H20=1")
    limited = told("plan", "islands", *ISLANDS, *prices, "--budget", "64")
    assert limited["usd_per_h"] <= 64
    bought = told("plan", "islands", *ISLANDS, *prices, "--load", "20")
    assert bought["served_rps"] >= 20 * (1 - 1e-6)
    assert bought["usd_per_h"] <= 96
    drawn = bought["served_rps_in_draws"]
    assert min(drawn) < bought["served_rps"] < max(drawn)
    share = 100 * sum(one >= 20 * (1 - 1e-9) for one in drawn) / len(drawn)
    out = said("plan", "islands", *ISLANDS, *prices, "--load", "20")
    assert f"Carries 20 requests/s in {share:.0f} % of 24 draws of step times." in out


def test_a_search_shows_its_distance_from_the_best_of_all(said, tmp_path: Path) -> None:
    search = ("--method", "mutation", "--batch", "4", "--iterations", "2")
    fleet = ("H200=32", "H20=32", "--trace", "azure2023_code")
    state = ("--state", tmp_path / "state.json")
    out = said("plan", "islands", *fleet, *search, *state)
    assert "No layout carries more than" in out
    assert said("plan", "islands", *fleet, *search, *state) == out


def test_help_shows_units_in_brackets(said) -> None:
    out = said("plan", "islands", "--help")
    assert "[tokens]" in out
    assert "[GPUs]" in out


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


SERVICE = "thunderserve-a40-3090ti-40gbit"
CHANGE = ("reschedule", SERVICE, *SHORT)
CUT = ("plan", "islands", "--trace", "azure2023_code")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*CUT, "H2000=32"), "No GPU is called 'H2000'"),
        ((*CUT, "H200=1"), "1 H200-SXM GPUs are fewer than the smallest island, 2"),
        ((*CUT, "H200=x"), "GPUs cannot read 'H200=x'"),
        ((*CUT, "H200=0"), "inventory holds no GPU"),
        ((*CUT, "H200=32", "--reading", "guess"), "No reading is called 'guess'"),
        ((*CUT, "H200=32", "--method", "guess"), "--method does not know 'guess'"),
        ((*CUT, "H200=32", "--method", "bo", "--pairs"), "A search knows no load"),
        ((*CUT, "H200=16", "--powers", "--budget", "9", "--price", "H200=4"), "No budget up to 9"),
        ((*CUT, "H200=16", "--powers", "--budget", "99"), "No price is given for H200-SXM"),
        ((*CUT, "H200=16", "--price", "H200=-1"), "--price H200 is -1"),
        ((*CUT, "H200=16", "--price", "H200=4", "--budget", "nan"), "--budget is nan"),
        ((*CUT, "H200=16", "H20=16", "--price", "H200=4"), "No price is given for H20"),
        ((*CUT, "H200=16", "--load", "1"), "No price is given for H200-SXM"),
        ((*CUT, "H200=16", "--model", "Llama-3-8B"), "Llama-3-8B has no experts"),
        ((*CUT, "H200=16", "--figure", "islands.txt"), "end its name with .png or .svg"),
        ((*CUT, "H200=16", "--figure", "no/such/folder/islands.png"), "no/such/folder"),
        ((*CUT, "H200=4", "--powers"), "No island class can prefill lengths 0-399 tokens"),
        (CHANGE, "None of --lose, --lose-gpu, --slow and --shift given"),
        ((*CHANGE, "--lose", "a40", "--slow", "a40,3090ti=0.5"), "2 of --lose"),
        ((*CHANGE, "--lose", "nobody"), "no machine 'nobody'"),
        ((*CHANGE, "--slow", "a40"), "--slow cannot read"),
        ((*CHANGE, "--lose", "a40", "--policies", "all"), "--policies does not know 'all'"),
        (("reschedule", SERVICE, *SHORT[:2], "--lose", "a40", "--rate", "0"), "--rate is 0"),
    ],
)
def test_errors_name_the_cause(run, words: tuple[str, ...], text: str) -> None:
    code, out, err = run(*words)
    assert code == 1
    assert out == ""
    assert text in err
    assert "Resolve:" in err
