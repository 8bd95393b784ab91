from __future__ import annotations

import json

import pandas as pd
import pytest

import hetero
from hetero import workload
from hetero.latency import storage
from hetero.latency.step import StepModel
from hetero.workload.statistics import rate_rps

SMALL = ("simulate", "xiong-8xv100", "--degree", "2", "--requests", "120")


def test_one_row_per_router_and_the_same_twice(said):
    first = said(*SMALL)
    assert "4 replicas on 2 x V100" in first
    for name in ("round robin", "least tokens", "power of two", "hetero"):
        assert f"\n{name} " in first
    assert said(*SMALL) == first


def test_json_conserves_requests_and_tokens(told):
    said = told(*SMALL, "--slo", "ttft=500ms,tpot=0.05s")
    trace = workload.load("azure2023_conv").head(120)
    assert said["requests"] == 120
    assert said["degrees"] == {"v100": 2}
    for row in said["routers"]:
        assert row["finished"] == 120
        span = row["window_s"][1]
        assert row["output_tps"] * span == pytest.approx(trace.output_tokens.sum())
        assert row["total_tps"] == pytest.approx(row["input_tps"] + row["output_tps"])
        assert row["slo"] == {"ttft_s": 0.5, "tpot_s": 0.05, "e2e_s": None}
        assert 0 <= row["attainment"]["joint"] <= row["attainment"]["ttft"] <= 1


def test_python_answers_as_the_command_and_an_own_router_is_one_of_them(
    tmp_path, monkeypatch, told, refused
):
    monkeypatch.chdir(tmp_path)
    router = "class First:\n    name = 'first'\n    choose = lambda self, request, fleet: 0\n"
    (tmp_path / "first_of_all.py").write_text(router)
    names = ("first_of_all:First", "round-robin", "hetero")
    routers = [word for name in names for word in ("--router", name)]
    said = told(*SMALL, *routers, "--rate", 4, "--slo", "ttft=1s", "--seeds", 3)
    words = {"degree": 2, "requests": 120, "router": names, "rate": 4.0, "slo": "ttft=1s"}
    found = hetero.simulation(SMALL[1], seeds=3, **words)
    assert json.loads(json.dumps(found.to_dict())) == said
    assert [row["router"] for row in said["routers"]] == ["first", "round robin", "hetero"]
    rows = {(row["metric"], row["system"]): row for row in said["over_seeds"]}
    assert rows["attainment", "first"]["high"] < 0  # one of four replicas, paired
    assert rows["ttft_p95_s", "first"]["difference"] > 0
    summary = found.comparison.summary().set_index("system").loc["first"]
    mean, high = 100 * summary["mean"], 100 * summary["mean_high"]
    assert f"  {mean:.3g} ± {float(f'{high - mean:.2g}'):g}  " in str(found)
    assert found.comparison.sentence in str(found)
    (tmp_path / "broken.py").write_text("class First:\n    name = 1 / 0\n")
    for name in ("first_of_all:Second", "broken:First", "nowhere:First", "a b:c"):
        assert "Resolve: name what a module" in refused(*SMALL, "--router", name)
    own = told(*SMALL, "--router", "least-requests", "--seeds", 2)["over_seeds"][0]["rate_rps"]
    assert own == pytest.approx(rate_rps(workload.load("azure2023_conv").head(120).arrival_s))


def test_rate_changes_the_time_the_trace_takes(told):
    spans = {}
    for rate in ("1", "2", "inf"):
        how = ("--rate", rate, "--arrivals", "scaled", "--router", "round-robin")
        spans[rate] = told(*SMALL, *how)["routers"][0]["window_s"][1]
    assert 1.9 < (spans["1"] - 10) / (spans["2"] - 10) < 2.6
    assert spans["inf"] < spans["2"] / 3


def test_lengths_without_arrivals_get_poisson_ones(told):
    sharegpt = (*SMALL, "--trace", "sharegpt", "--router", "round-robin")
    slow, at_once = (told(*sharegpt, *rate)["routers"][0] for rate in (("--rate", "2"), ()))
    assert slow["window_s"][1] > 45  # 120 requests at 2 per second
    assert at_once["window_s"][1] < 45


def test_requests_come_as_asked_and_the_answer_says_how(tmp_path, told):
    own = tmp_path / "own.csv"
    stamps = [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0, 6.0]
    rows = "".join(f"{stamp},100,{10 + n}\n" for n, stamp in enumerate(stamps))
    own.write_text("arrival_s,input_tokens,output_tokens\n" + rows)

    def gaps(*options):
        path = tmp_path / "run.csv"
        one = ("--router", "round-robin", "--output", path, "--force")
        found = told(*SMALL, "--trace", own, *one, *options)["arrivals"]
        return pd.read_csv(path)["arrival_s"].sort_values().diff().dropna().round(6), found

    as_it_is, said = gaps()
    assert set(as_it_is) == {0.0, 3.0}
    assert said == "arrivals of its own"
    stretched, said = gaps("--rate", "3")  # 8 gaps in 6 s were 1.33 requests/s
    assert stretched.max() == pytest.approx(8 / 3 / 2, rel=0.01)
    assert "stretched" in said
    assert "3 requests/s" in said
    drawn, said = gaps("--rate", "3", "--arrivals", "poisson")
    assert len(set(drawn)) == 8
    assert "Poisson" in said
    assert gaps("--rate", "inf")[1] == "all at once"


def test_clients_send_when_they_are_answered(tmp_path, told):
    path = tmp_path / "run.csv"
    one = (*SMALL, "--router", "least-requests", "--output", path, "--force")
    said = told(*one, "--clients", "7", "--think", "0.5")["arrivals"]
    assert said == "7 clients that each wait for an answer and 0.5 s more"
    rows = pd.read_csv(path)
    assert (rows["arrival_s"] == 0).sum() == 7
    # Written with all digits: every later request follows an answer.
    ends = (rows["finish_s"] + 0.5).round(9)
    assert rows["arrival_s"][7:].round(9).isin(ends).all()
    assert told(*one, "--clients", "1")["arrivals"] == "one client that waits for an answer"


@pytest.mark.parametrize("name", ["run.csv", "run.parquet"])
def test_output_holds_every_request_of_every_router(tmp_path, said, refused, name):
    path = tmp_path / name
    routers = ("--router", "least-requests", "--router", "workload")
    assert "240 rows written" in said(*SMALL, *routers, "--output", path)
    frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    assert frame["router"].value_counts().to_dict() == {"least requests": 120, "workload": 120}
    assert (frame["finish_s"] >= frame["first_token_s"]).all()
    assert (frame["first_token_s"] > frame["arrival_s"]).all()
    assert "--force" in refused(*SMALL, "--output", path)
    assert said(*SMALL, *routers, "--output", path, "--force")


def test_degrees_by_machine_and_machines_left_out(said, told):
    common = ("simulate", "xiong-v100-a800", "--requests", "50")
    assert told(*common, "--degree", "v100=4,a800=1")["degrees"] == {"v100": 4, "a800": 1}
    one = said(*common, "--degree", "a800=1")
    assert "1 replica on 1 x A800" in one
    assert "does not name it: v100" in one
    assert "does not fit: a800" in said(*common, "--model", "Llama-2-70B")


def test_step_times_of_a_file_replace_the_roofline(told, tmp_path):
    file = tmp_path / "server.json"
    affine = StepModel.affine(floor_s=0.05, per_token_s=0.0, per_cached_token_s=0.0)
    storage.save(affine, file)
    one = ("--router", "round-robin", "--rate", "0.01")
    said = told(*SMALL, *one, "--steps", f"V100-SXM2-32GB={file}")
    # A request that is alone has its first token, and every next one, after one step of 50 ms.
    at = said["routers"][0]["percentiles"]
    assert at["tpot_s"]["50"] == pytest.approx(0.05)
    assert at["ttft_s"]["50"] == pytest.approx(0.05)
    assert f"Step times of V100-SXM2-32GB x2: own file: {file}" in said["notes"][-3]


def test_the_answer_says_where_step_times_come_from(told, tmp_path):
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "machines:\n  - {name: a, gpu: RTX-PRO-6000-Server}\n  - {name: b, gpu: A40}\n"
    )
    notes = told("simulate", fleet, "--requests", "20", "--model", "Llama-3.1-8B")["notes"]
    assert any("RTX-PRO-6000-Server x1: layer profile" in one for one in notes)
    assert any("A40 x1: assumed: roofline" in one for one in notes)


def test_an_engine_is_as_its_log_says(tmp_path, told):
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("machines:\n  - {name: a, gpu: A40}\n  - {name: b, gpu: A40}\n")
    own = tmp_path / "own.csv"
    rows = "".join("0.0,1000,200\n" for _ in range(60))
    own.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    one = ("simulate", fleet, "--trace", own, "--degree", "1", "--router", "round-robin")

    def run(*options):
        said = told(*one, *options)
        at = said["routers"][0]["percentiles"]
        return at["ttft_s"]["50"], at["e2e_s"]["99"], said["notes"]

    plain = run()
    assert run("--chunk", 2048, "--memory", 0.92, "--kv-precision", "fp16") == plain
    # A step of 128 tokens takes eight and more for each prompt.
    assert run("--chunk", 128)[0] > 1.1 * plain[0]
    # Caches for ten requests at a time: the last wait for the first.
    small = run("--kv-tokens", 12_000)
    assert small[1] > 1.5 * plain[1]
    assert plain[1] < run("--kv-tokens", "a=12000")[1] <= small[1]
    # The weights of 16 GB leave a cache of a few thousand tokens in 19 GB.
    assert run("--memory", 0.42)[1] > 1.1 * plain[1]
    # Half the bytes are read for the same context.
    assert run("--kv-precision", "fp8")[1] < plain[1]
    # Prompts that come while a step runs wait for one more.
    late = ("--rate", 4, "--arrivals", "poisson")
    ahead, then = run(*late), run(*late, "--no-schedule-ahead")
    assert ahead[0] > then[0]
    assert any("prepared ahead" in one for one in ahead[2])
    assert not any("prepared ahead" in one for one in then[2])
    old = run(*late, "--engine", "vllm@0.12")
    assert old[:2] == then[:2]  # its cache is smaller, but not so small that it tells
    assert old[2][-1] != then[2][-1]
    assert run("--engine", "any")[1] < plain[1]  # no time but that of kernels
    # Prompts that share nothing by name have nothing in a cache.
    again = run("--prefix-cache")
    assert again[:2] == plain[:2]
    assert any("names no blocks" in one for one in again[2])
    # Half of every prompt is that of all others, and need not be computed again.
    shared = run("--prefix-share", 0.5)
    assert shared[0] < 0.7 * plain[0]
    assert run("--prefix-share", 0.5, "--no-prefix-cache")[:2] == plain[:2]
    assert run("--prefix-share", 0.5, "--engine", "any")[:2] == run("--engine", "any")[:2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arrivals", "scaled"), "give --rate"),
        (("--arrivals", "trace", "--rate", "3"), "leave out --rate"),
        (("--clients", "4", "--rate", "2"), "leave out --rate and --arrivals"),
        (("--clients", "4", "--arrivals", "trace"), "leave out --rate and --arrivals"),
        (("--think", "2"), "give --clients"),
        (("--clients", "4", "--think", "-1"), "think_s is -1"),
        (("--kv-tokens", "3"), "at least 16"),
        (("--kv-tokens", "v10=64"), "no machine 'v10'"),
        (("--kv-tokens", "much"), "one per machine"),
        (("--memory", "1.2"), "memory_fraction"),
        (("--kv-precision", "fp3"), "fp16"),
        (("--engine", "vlm"), "did you mean 'vllm'"),
        (("--engine", "vllm@next"), "no release"),
        (("--schedule-ahead", "--batching", "prefill-first"), "chunked"),
        (("--steps", "V100-SXM2-32GB=a.json"), "say which with --degree"),
        (("--degree", "2", "--steps", "a.json"), "write a GPU and a file"),
        (("--degree", "2", "--steps", "A40=a.json"), "has no GPU 'A40'"),
        (("--degree", "2", "--steps", "V100-SXM2-32GB=none.json"), "none.json"),
        (("--router", "hetro"), "did you mean 'hetero'?"),
        (("--batching", "chunk"), "chunked, prefill-first"),
        (("--slo", "ttft=5"), "with their unit"),
        (("--slo", "ttft=1s,ttft=2s"), "twice"),
        (("--slo", "tpot=0ms"), "above 0"),
        (("--slo", "tpot=1.2.3ms"), "no number"),
        (("--rate", "0"), "above 0"),
        (("--rate", "nan"), "above 0"),
        (("--degree", "3"), "divides 8"),
        (("--degree", "v100=x"), "one per machine"),
        (("--degree", "v10=1"), "no machine 'v10'"),
        (("--output", "x.txt"), ".parquet"),
        (("--output", "no/such/folder/x.csv"), "folder"),
        (("--trace", "azure"), "neither a file nor a known trace"),
        (("--model", "Llama-2-70B", "--degree", "1"), "GiB short"),
    ],
)
def test_errors_are_one_sentence_with_a_way_out(refused, arguments, words):
    said = refused("simulate", "xiong-8xv100", "--requests", "20", *arguments)
    assert said.startswith("Error: ")
    assert "Resolve: " in said
    assert said.count("\n") == 1
    assert words in said
