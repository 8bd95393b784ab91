from __future__ import annotations

from pathlib import Path

import pytest

FLEET = ("H200=16", "H20=32", "--powers", "--trace", "azure2023_code")


def test_a_plan_with_bound_cost_and_picture(said, told, refused, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    prices = ("--price", "H200=4", "--price", "H20=1")
    out = said("plan", "islands", *FLEET, *prices, "--figure", picture)
    assert "proven" in out
    assert "$/h" in out
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "--force" in refused("plan", "islands", *FLEET, "--figure", picture)
    plan = told("plan", "islands", *FLEET, *prices)
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


FILE = """
gpus:
  X1: {mem_gib: 144, mem_bw_gbs: 5200, fp16_tflops: 700, fp8_tflops: 1400, usd_per_h: 2}
machines:
  - {name: a, gpu: X1, count: 8, copies: 2}
  - {name: b, gpu: H20, count: 8, copies: 2, usd_per_h: 9.6}
"""


def test_a_cluster_file_brings_gpus_of_its_own_and_prices(said, told, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FILE)
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
    limited = told("plan", "islands", *FLEET, *prices, "--budget", "64")
    assert limited["usd_per_h"] <= 64
    bought = told("plan", "islands", *FLEET, *prices, "--load", "20")
    assert bought["served_rps"] >= 20 * (1 - 1e-6)
    assert bought["usd_per_h"] <= 96
    drawn = bought["served_rps_in_draws"]
    assert min(drawn) < bought["served_rps"] < max(drawn)
    share = 100 * sum(one >= 20 * (1 - 1e-9) for one in drawn) / len(drawn)
    out = said("plan", "islands", *FLEET, *prices, "--load", "20")
    assert f"Carries 20 requests/s in {share:.0f} % of 24 draws of step times." in out


def test_a_search_shows_its_distance_from_the_best_of_all(said, tmp_path: Path) -> None:
    search = ("--method", "mutation", "--batch", "4", "--iterations", "2")
    fleet = ("H200=32", "H20=32", "--trace", "azure2023_code")
    state = ("--state", tmp_path / "state.json")
    out = said("plan", "islands", *fleet, *search, *state)
    assert "No layout carries more than" in out
    assert said("plan", "islands", *fleet, *search, *state) == out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("H2000=32",), "No GPU is called 'H2000'"),
        (("H200=1",), "1 H200-SXM GPUs are fewer than the smallest island, 2"),
        (("H200=x",), "GPUs cannot read 'H200=x'"),
        (("H200=0",), "inventory holds no GPU"),
        (("H200=32", "--reading", "guess"), "No reading is called 'guess'"),
        (("H200=32", "--method", "guess"), "--method does not know 'guess'"),
        (("H200=32", "--method", "bo", "--pairs"), "A search knows no load"),
        (("H200=16", "--powers", "--budget", "9", "--price", "H200=4"), "No budget up to 9"),
        (("H200=16", "--powers", "--budget", "99"), "No price is given for H200-SXM"),
        (("H200=16", "--price", "H200=-1"), "--price H200 is -1"),
        (("H200=16", "--price", "H200=4", "--budget", "nan"), "--budget is nan"),
        (("H200=16", "H20=16", "--price", "H200=4"), "No price is given for H20"),
        (("H200=16", "--load", "1"), "No price is given for H200-SXM"),
        (("H200=16", "--model", "Llama-3-8B"), "Llama-3-8B has no experts"),
        (("H200=16", "--figure", "islands.txt"), "end its name with .png or .svg"),
        (("H200=16", "--figure", "no/such/folder/islands.png"), "no/such/folder"),
        (("H200=4", "--powers"), "No island class can prefill lengths 0-399 tokens"),
    ],
)
def test_errors_name_the_cause(run, arguments: tuple[str, ...], text: str) -> None:
    status, out, err = run("plan", "islands", *arguments, "--trace", "azure2023_code")
    assert status != 0
    assert out == ""
    assert text in err
    assert "Resolve:" in err


def test_help_shows_units_in_brackets(said) -> None:
    out = said("plan", "islands", "--help")
    assert "[tokens]" in out
    assert "[GPUs]" in out
