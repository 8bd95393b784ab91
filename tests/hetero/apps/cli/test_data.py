from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from hetero import paths, workload
from hetero.apps import cli
from hetero.workload import datasets, readers

Run = Callable[..., tuple[int, str, str]]


def test_commands_are_built_once_however_often_they_are_called(run: Run) -> None:
    assert run("--help")[0] == 0
    known = len(cli.app.registered_groups) + len(cli.app.registered_commands)
    assert known > 15
    assert run("--help")[0] == 0
    assert len(cli.app.registered_groups) + len(cli.app.registered_commands) == known


def refused(outcome: tuple[int, str, str], says: str) -> None:
    code, _, error = outcome
    assert code != 0
    assert says in error
    assert error.startswith("Error: ")
    assert "Resolve: " in error
    assert error.count("\n") == 1  # one sentence, no traceback


def test_list_shows_every_dataset(run: Run) -> None:
    code, out, _ = run("data", "list")
    assert code == 0
    assert all(name in out for name in datasets.registry())
    assert "CC-BY-4.0" in out


def test_check_fails_on_a_damaged_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "raw", lambda: tmp_path / "raw")
    monkeypatch.setenv(datasets.MIRROR, str(tmp_path))
    code, out, _ = run("data", "check")
    assert code == 0
    assert "missing" in out
    (tmp_path / "splitwise").mkdir()
    (tmp_path / "splitwise" / "perf_model.csv").write_text("model\n")
    outcome = run("data", "check")
    refused(outcome, "1 of the files are not the published ones")
    assert "1 of 1 damaged" in outcome[1]


def test_fetch_wants_names_or_all(run: Run) -> None:
    for wrong in ((), ("azure2023_conv", "--all")):
        refused(run("data", "fetch", *wrong), "either names or --all")
    refused(run("data", "fetch", "no_such"), "No dataset is called 'no_such'")


def test_usage_errors_are_one_sentence(run: Run) -> None:
    refused(run("data", "fetsh"), "'fetch'? Resolve: see `hetero data --help`.")
    refused(run("trace", "describe", "sharegpt", "--seed", "-1"), "--seed")
    refused(run("trace", "draw", "azure2023_con", "-o", "x.csv"), "neither a file nor a known")
    refused(run("trace", "draw", "azure2023_conv", "-o", "x.txt"), ".csv, .csv.gz or .parquet")
    refused(run("trace", "draw", "azure2023_conv", "-o", "x.csv", "--rate", "fast"), "--rate")
    refused(run("trace", "draw", "azure2023_conv", "--sed", "3"), "--sed")
    refused(run("trace", "describe", "sharegpt", "--source", "fake"), "fake")


def test_describe_takes_names_and_files(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("trace", "describe", "azure2023_code")
    assert code == 0
    assert "twin:azure2023_code, seed 0" in out
    assert "8,819" in out
    file = tmp_path / "mine.csv"
    file.write_text("ms,prompt,answer\n" + "".join(f"{250 * k},9,{k}\n" for k in range(40)))
    columns = ("--columns", "arrival=ms,input=prompt,output=answer")
    code, out, _ = run("trace", "describe", str(file), columns[0], f"{columns[1]},unit=ms")
    assert code == 0
    assert "4.0000" in out  # requests/s
    refused(run("trace", "describe", str(file)), "no known kind of trace")
    refused(run("trace", "describe", str(file), *columns), "--columns unit=")
    refused(run("trace", "describe", str(tmp_path / "none.csv")), "neither a file nor")
    refused(run("trace", "describe", "sharegpt", *columns), "are known")


def test_a_log_with_iso_stamps_is_read_by_its_columns(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    rows = [f"2026-03-01T10:00:{s:02d}Z,9,4\n" for s in (5, 0, 10)]
    file.write_text("timestamp,prompt,reply\n" + "".join(rows))
    named = "arrival=timestamp,input=prompt,output=reply"
    refused(run("trace", "describe", str(file), "--columns", named), "before the one above")
    found = workload.open_trace(file, columns=f"{named},sort")
    assert found.arrival_s.tolist() == [0.0, 5.0, 10.0]
    assert found.own_bursts
    assert not workload.open_trace(file, columns="input=prompt,output=reply").own_bursts
    for wrong in ("arrival", "colour=red", "input=a,input=b", "unit=years", "sort=yes"):
        refused(run("trace", "describe", str(file), "--columns", wrong), "Resolve: ")


def test_an_option_of_one_value_is_given_once(run: Run) -> None:
    twice = run("trace", "describe", "sharegpt", "--seed", "1", "--seed", "2")
    refused(twice, "--seed takes one value and is given 2 times")
    assert twice[0] == 2
    card = run("plan", "xiong-v100-a800", "--model", "Llama-3-8B", "--goal", "1", "--goal", "0.9")
    refused(card, "--goal takes one value and is given 2 times")


def test_what_has_no_answer_names_the_nearest_that_has(run: Run) -> None:
    asked = run("plan", "xiong-v100-a800", "--model", "Llama-3-8B", "--autoscale", "target")
    refused(asked, "Resolve: `hetero size --curve day.csv --autoscale")
    assert asked[0] == 2


def test_a_bad_row_reaches_the_user_with_its_place(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n1,-5,5\n")
    refused(run("trace", "describe", str(file)), f"{file}, line 3, column 'input_tokens'")


def test_real_names_need_their_data(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "raw", lambda: tmp_path)
    monkeypatch.delenv(datasets.MIRROR, raising=False)
    outcome = run("trace", "describe", "azure2023_code", "--source", "real")
    refused(outcome, "hetero data fetch azure2023_code")


def test_draw_twin_and_draw_again(run: Run, tmp_path: Path) -> None:
    trace, twin, again = (str(tmp_path / name) for name in ("a.csv", "t.json", "b.parquet"))
    assert run("trace", "draw", "azure2023_code", "-o", trace, "--seed", "3")[0] == 0
    drawn = readers.read(trace)
    expected = workload.load("azure2023_code", seed=3)
    assert drawn.arrival_s.tolist() == expected.arrival_s.tolist()
    assert drawn.input_tokens.tolist() == expected.input_tokens.tolist()
    code, out, _ = run("trace", "twin", trace, "-o", twin, "--draws", "3")
    assert code == 0
    assert "KS distance of input lengths" in out
    assert run("trace", "draw", twin, "-o", again, "--rate", "2")[0] == 0
    assert len(readers.read(again)) == 2 * len(drawn)


def test_nothing_is_overwritten_unasked(run: Run, tmp_path: Path) -> None:
    for arguments in (
        ("draw", "sharegpt", "-o", str(tmp_path / "a.csv")),
        ("twin", str(tmp_path / "a.csv"), "-o", str(tmp_path / "t.json"), "--draws", "1"),
    ):
        target = Path(arguments[3])
        assert run("trace", *arguments)[0] == 0
        target.write_text("mine")
        refused(run("trace", *arguments), "exists already")
        assert target.read_text() == "mine"
        assert run("trace", *arguments, "--force")[0] == 0
        assert target.read_text() != "mine"
        if target.suffix == ".csv":
            continue
    refused(run("trace", "draw", "sharegpt", "-o", str(tmp_path / "x.txt")), "no known kind")
    refused(run("trace", "draw", "sharegpt", "-o", str(tmp_path / "no" / "x.csv")), "folder")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.csv", "t.json"]


@pytest.mark.parametrize(
    "name", ["claims", "figures", "bench", "repro", "sweep", "status", "verify"]
)
def test_commands_of_a_checkout_say_so_elsewhere(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(paths, "is_checkout", lambda: False)
    monkeypatch.setattr(cli, "app", typer.Typer())
    cli.command.cache_clear()
    try:
        code, out, err = run(name, "anything", "--json")
    finally:
        cli.command.cache_clear()
    assert (code, out) == (1, "")
    assert err.endswith("Resolve: clone the hetero repository and run this command inside it.\n")
