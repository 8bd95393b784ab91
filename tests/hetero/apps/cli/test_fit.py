from __future__ import annotations

import json

import numpy as np
import pytest

from hetero.latency import storage

HEAD = "phase,batch,input_tokens,context_tokens,ms\n"


@pytest.fixture
def grid(tmp_path):
    lines = [HEAD.strip()]
    rng = np.random.default_rng(1)
    for b in (1, 2, 4, 8):
        for n in (128, 512, 2048):
            noise = 1 + 0.01 * rng.standard_normal(2)
            prefill = (10 + 0.05 * b * n + 0.5 * b + 0.002 * n) * noise[0]
            decode = (20 + 2e-4 * b * n + 0.3 * b + 5e-4 * n) * noise[1]
            lines += [f"prefill,{b},{n},,{prefill}", f"decode,{b},,{n},{decode}"]
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_fit_prints_coefficients_intervals_and_errors(grid, said):
    text = said("fit", grid)
    assert "p1" in text
    assert "95 % low" in text
    assert "mean error" in text
    assert "Reduction to a step model" in text


def test_json_holds_the_truth_within_its_intervals(grid, told):
    found = told("fit", grid, "--confidence", "0.999")
    truth = {"p1": 5e-5, "p2": 5e-4, "p3": 2e-6, "p4": 1e-2}
    truth |= {"p5": 2e-7, "p6": 3e-4, "p7": 5e-7, "p8": 2e-2}
    coefficients = found["prefill"]["coefficients"] | found["decode"]["coefficients"]
    assert coefficients.keys() == truth.keys()
    for name, value in truth.items():
        assert coefficients[name]["low"] <= value <= coefficients[name]["high"]
    assert coefficients["p5"]["unit"] == "s/token"
    assert found["decode"]["accuracy"]["rows"] == 12


def test_output_is_a_step_model_and_is_not_replaced_unasked(grid, tmp_path, said, refused):
    target = tmp_path / "model.json"
    assert f"Wrote {target}" in said("fit", grid, "--non-negative", "--output", target)
    model = storage.load(target)
    assert 1e3 * float(model.decode_seconds([512] * 4)) == pytest.approx(21.87, rel=0.02)
    before = target.read_bytes()
    assert "exists already" in refused("fit", grid, "--output", target)
    assert target.read_bytes() == before
    assert said("fit", grid, "--non-negative", "--output", target, "--force")


def test_floor_and_own_headings(tmp_path, said):
    path = tmp_path / "own.csv"
    rows = [f"prefill,1,{n},{max(50, 0.1 * n)}" for n in (64, 128, 256, 1024, 2048, 4096)]
    path.write_text("phase,bs,len,ms\n" + "\n".join(rows) + "\n")
    options = ("--floor", "--column", "batch=bs", "--column", "input_tokens=len")
    text = said("fit", path, *options)
    assert "floor up to 500 tokens" in text
    assert "No step model: own.csv has no decode rows" in text


def cross(tmp_path):
    path = tmp_path / "cross.csv"
    settings = [(1, n) for n in (128, 256, 512, 1024)] + [(b, 512) for b in (2, 4, 8)]
    path.write_text(HEAD + "".join(f"prefill,{b},{n},,{5 + 0.05 * b * n}\n" for b, n in settings))
    return path


def test_designs_that_determine_too_little_are_refused_with_a_way_out(tmp_path, said, refused):
    path = cross(tmp_path)
    error = refused("fit", path)
    assert "b I = 512 b + I - 512" in error
    assert "--form cross" in error
    assert "slope along I at b = 1" in said("fit", path, "--form", "cross")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "sqrt"), "--weights does not know 'sqrt'"),
        (("--form", "ful"), "did you mean 'full'?"),
        (("--column", "batch"), "--column cannot read 'batch'"),
        (("--column", "batch=bs"), "has no column 'bs' for batch"),
    ],
)
def test_bad_options_end_in_one_sentence(grid, refused, options, message):
    error = refused("fit", grid, *options)
    assert error.startswith("Error: ")
    assert message in error
    assert "Resolve: " in error


def test_bad_cells_and_missing_phases(tmp_path, refused):
    path = tmp_path / "bad.csv"
    path.write_text(HEAD + "prefill,1,128,,10\nprefill,one,128,,10\n")
    assert "line 3, column 'batch': 'one' is not a number" in refused("fit", path)
    target = tmp_path / "out.json"
    assert "has no decode rows" in refused(
        "fit", cross(tmp_path), "--form", "cross", "--output", target
    )
    assert not target.exists()


def test_negative_rates_are_told_apart_from_broken_input(tmp_path, said, refused):
    path = tmp_path / "falling.csv"
    lines = [f"prefill,{b},{n},,{5 + 0.05 * b * n}" for b in (1, 2, 4) for n in (64, 512)]
    lines += [f"decode,{b},,{n},{30 + b - 1e-3 * n}" for b in (1, 2, 4) for n in (64, 512)]
    path.write_text(HEAD + "\n".join(lines) + "\n")
    assert "No step model: A step model needs" in said("fit", path)
    assert "non-negative" in refused("fit", path, "--output", tmp_path / "o.json")


def test_a_missing_file_is_named(tmp_path, refused):
    said = "none.csv: there is no such file. Resolve: check the path.\n"
    assert said in refused("fit", tmp_path / "none.csv")


def test_requests_of_benchmarks_are_for_observe(grid, tmp_path, refused):
    vllm = {"input_lens": [9], "output_lens": [5], "ttfts": [0.1], "itls": [[0.01]], "errors": [""]}
    genai = {"experiments": [{"requests": [{"timestamp": 1, "response_timestamps": [2]}]}]}
    genai["experiments"][0]["requests"][0]["response_outputs"] = ["data: {}"]
    for tool, content in (
        ("sglang.bench_serving or an older vllm bench serve", json.dumps(vllm)),
        ("genai-perf", json.dumps(genai)),
        ("a benchmark", json.dumps({"request_throughput": 3.0, "completed": 9})),
        ("hetero replay", "arrival_s,input_tokens,output_tokens,ttft_s,e2e_s\n0,9,5,0.1,0.2\n"),
    ):
        (tmp_path / "b.json").write_text(content)
        error = refused("fit", tmp_path / "b.json")
        assert f"it is of {tool}: requests under load" in error
        assert "hetero observe" in error
    grid.write_text(grid.read_text().replace("phase", "stage"))
    assert "no column 'phase'" in refused("fit", grid)
