from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from hetero import workload
from hetero.apps.profiling.observed import ServedLog
from hetero.errors import DataError, ParameterError
from hetero.workload import datasets, readers

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = [f"2023-11-16 18:17:{k:02d}.5000000,{100 + k},{k}" for k in range(20)]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, read: Callable[[Path], object] = readers.read) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert " Resolve: " in text
    assert "\n" not in text
    return caught.value


# The real files --------------------------------------------------------------------------------


def test_azure_conversation_is_what_the_papers_describe(need: Callable[[str], None]) -> None:
    need("azure2023_conv")
    trace = workload.load("azure2023_conv", "real")
    assert len(trace) == 19_366
    assert trace.arrival_s[0] == 0.0
    assert trace.arrival_s[-1] == pytest.approx(3501.721937)
    # ThunderServe App. E: medians 1,020 and 129.
    assert np.median(trace.input_tokens) == 1020
    assert np.median(trace.output_tokens) == 129
    # Helix 6.2: 16,657 requests, means 763 and 232; the rule it prints keeps six more.
    printed = trace.filter(input_tokens=(1, 2048), output_tokens=(0, 1024))
    assert len(printed) == 16_663
    kept = trace.filter(input_tokens=(4, 2048), output_tokens=(0, 1024))
    assert len(kept) == 16_657
    assert round(kept.input_tokens.mean()) == 763
    assert round(kept.output_tokens.mean()) == 232


def test_helix_used_exactly_the_filtered_requests(need: Callable[[str], None]) -> None:
    need("azure2023_conv")
    need("helix_lengths")
    ours = workload.load("azure2023_conv", "real").filter(
        input_tokens=(4, 2048), output_tokens=(0, 1024)
    )
    theirs = readers.read(datasets.path("helix_lengths", "azure_conv.csv.gz"))
    np.testing.assert_array_equal(ours.input_tokens, theirs.input_tokens)
    np.testing.assert_array_equal(ours.output_tokens, theirs.output_tokens)


def test_azure_code_is_what_the_papers_describe(need: Callable[[str], None]) -> None:
    need("azure2023_code")
    trace = workload.load("azure2023_code", "real")
    assert len(trace) == 8_819
    assert np.median(trace.input_tokens) == 1469
    assert np.median(trace.output_tokens) == 13


def test_mooncake_has_the_published_means_and_prefix_hits(need: Callable[[str], None]) -> None:
    need("mooncake_conversation")
    trace = workload.load("mooncake_conversation", "real")
    assert len(trace) == 12_031
    # Table in its description: 12,035 input and 343 output tokens on average.
    assert round(trace.input_tokens.mean()) == 12_035
    assert round(trace.output_tokens.mean()) == 343
    assert trace.prefix_offsets is not None
    assert trace.prefix_ids is not None
    # A block of 512 tokens for every started 512 input tokens.
    blocks = np.diff(trace.prefix_offsets)
    np.testing.assert_array_equal(blocks, -(-trace.input_tokens // trace.block_tokens))
    assert len(trace.prefix_ids) == 288_500
    hits = 1 - len(np.unique(trace.prefix_ids)) / len(trace.prefix_ids)
    assert hits == pytest.approx(0.366, abs=0.001)


@pytest.mark.parametrize("name", ["mooncake_synthetic", "sharegpt", "alpaca", "arxiv"])
def test_the_other_real_traces_load(name: str, need: Callable[[str], None]) -> None:
    rows = {"mooncake_synthetic": 3993, "sharegpt": 82_814, "alpaca": 47_379, "arxiv": 28_257}
    needed = {"mooncake_synthetic": "mooncake_synthetic", "arxiv": "vidur_arxiv"}
    need(needed.get(name, "helix_lengths"))
    trace = workload.load(name, "real")
    assert len(trace) == rows[name]
    assert trace.source.startswith("real:")


# Bad rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ("2023-11-16 18:17:10.5,-3,5", "ContextTokens", "'-3' is not a possible number"),
        ("2023-11-16 18:17:10.5,0,5", "ContextTokens", "at least 1"),
        ("2023-11-16 18:17:10.5,9,-5", "GeneratedTokens", "'-5'"),
        ("2023-11-16 18:17:10.5,,5", "ContextTokens", "missing"),
        ("2023-11-16 18:17:10.5,7", "GeneratedTokens", "missing"),
        ("2023-11-16 18:17:10.5,7,abc", "GeneratedTokens", "'abc' is not a number"),
        ("2023-11-16 18:17:10.5,7.5,3", "ContextTokens", "'7.5' is not a whole number"),
        ("2023-11-16 18:17:10.5,3e9,3", "ContextTokens", "'3e9' is not a possible number"),
        ("2023-11-16 18:17:10.5,inf,3", "ContextTokens", "'inf' is not a number"),
        ("yesterday,7,3", "TIMESTAMP", "'yesterday' is not a date"),
        (",7,3", "TIMESTAMP", "missing"),
        ("", "ContextTokens", "missing"),
        ("2023-11-16 18:16:59.5,7,3", "TIMESTAMP", "before the one above"),
    ],
)
def test_a_bad_row_is_told_by_line_and_column(
    tmp_path: Path, row: str, column: str, says: str
) -> None:
    lines = [*ROWS[:10], row, *ROWS[11:]]
    path = write(tmp_path / "trace.csv", AZURE + "\n".join(lines) + "\n")
    error = refused(path)
    assert error.line == 12  # the heading is line 1
    assert error.column == column
    assert says in str(error)


def test_blank_lines_at_the_end_are_no_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", AZURE + "\n".join(ROWS) + "\n\n\n")
    assert len(readers.read(path)) == 20


def test_unsorted_files_can_be_sorted(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", AZURE + "\n".join([ROWS[3], ROWS[1], *ROWS[4:]]))
    assert "sort=True" in refused(path).resolve
    trace = readers.read(path, sort=True)
    assert trace.input_tokens[:3].tolist() == [101, 103, 104]
    assert trace.arrival_s[:3].tolist() == [0.0, 2.0, 3.0]


def test_a_missing_column_is_named_with_those_there(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n")
    error = refused(path)
    assert error.column == "GeneratedTokens"
    assert "ContextTokens, TIMESTAMP" in str(error)
    assert "no known kind" in str(refused(write(path, "when,what\n1,2\n")))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.csv", b"", "it is empty"),
        ("heading.csv", AZURE.encode(), "no requests"),
        ("wide.csv", AZURE.encode() + b"1,2,3\n1,2,3,4\n", "cannot be split into columns"),
        ("latin.csv", b"arrival_s,input_tokens,output_tokens\n1,2,\xff\n", "not UTF-8"),
        ("no.csv.gz", b"not compressed", "cannot be read"),
        ("cut.csv.gz", gzip.compress(AZURE.encode() * 99, mtime=0)[:-20], "cannot be read"),
        ("no.parquet", b"PAR1 but not really", "cannot be read"),
        ("empty.jsonl", b"", "it is empty"),
    ],
)
def test_broken_files_end_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert says in str(refused(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        assert "no such file" in str(refused(tmp_path / name))


# Units of time ---------------------------------------------------------------------------------


def own(tmp_path: Path, times: list[object]) -> Path:
    body = "".join(f"{t},10,5\n" for t in times)
    return write(tmp_path / "own.csv", "when,prompt,answer\n" + body)


def read_own(unit: str, **options: object) -> Callable[[Path], workload.Trace]:
    columns = f"arrival=when,input=prompt,output=answer,unit={unit}"
    return lambda path: readers.read(path, columns=columns, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_units_of_time(tmp_path: Path, unit: str) -> None:
    factor = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    path = own(tmp_path, [k * factor for k in range(30)])
    assert read_own(unit)(path).arrival_s.tolist() == list(range(30))


@pytest.mark.parametrize(
    ("meant", "said"),
    [("ms", "s"), ("us", "s"), ("ns", "s"), ("s", "ms"), ("s", "us"), ("us", "ms")],
)
def test_a_wrong_unit_is_noticed_by_the_rate(tmp_path: Path, meant: str, said: str) -> None:
    factor = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[meant]
    path = own(tmp_path, [k * factor / 4 for k in range(30)])  # 4 requests/s
    error = refused(path, read_own(said))
    assert f"unit '{said}' seems wrong" in str(error)
    assert error.column == "when"
    assert len(read_own(said, plausible_rps=(0, np.inf))(path)) == 30


def test_a_thousand_requests_per_second_are_plausible_and_more_are_not(tmp_path: Path) -> None:
    assert len(read_own("s")(own(tmp_path, [k / 900 for k in range(30)]))) == 30
    refused(own(tmp_path, [k / 1100 for k in range(30)]), read_own("s"))


def test_stamps_since_1970_need_rebase(tmp_path: Path) -> None:
    path = own(tmp_path, [1_700_000_000 + k for k in range(30)])
    assert "--columns rebase" in refused(path, read_own("s")).resolve
    assert read_own("s,rebase")(path).arrival_s.tolist() == list(range(30))


def test_dates_with_and_without_fractions_and_zones(tmp_path: Path) -> None:
    path = own(
        tmp_path,
        ["2024-05-10 00:00:00", "2024-05-10 00:00:00.1234567", "2024-05-10T02:00:01+02:00"],
    )
    assert read_own("datetime")(path).arrival_s.tolist() == pytest.approx([0.0, 0.1234567, 1.0])


def test_negative_times_are_refused(tmp_path: Path) -> None:
    error = refused(own(tmp_path, [-1, 0, 1]), read_own("s"))
    assert (error.line, error.column) == (2, "when")


# Other kinds -----------------------------------------------------------------------------------


def test_parquet_with_own_columns_and_sessions(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    frame = pd.DataFrame({"t": [0, 500], "i": [3, 4], "o": [1, 0], "chat": [9, 9]})
    frame.to_parquet(path)

    def read(file: Path) -> workload.Trace:
        return readers.read(file, columns="arrival=t,input=i,output=o,session=chat,unit=ms")

    trace = read(path)
    assert trace.arrival_s.tolist() == [0.0, 0.5]
    assert trace.session_ids is not None
    assert trace.session_ids.tolist() == [9, 9]
    frame.assign(i=[3, -4]).to_parquet(path)
    assert "row 2: '-4'" in str(refused(path, read))


def test_damaged_notes_of_pandas_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    frame = pd.DataFrame({"arrival_s": [0.0], "input_tokens": [3], "output_tokens": [4]})
    table = pa.Table.from_pandas(frame).replace_schema_metadata({"pandas": "{damaged"})
    pyarrow.parquet.write_table(table, path)
    assert len(readers.read(path)) == 1


def test_sessions_may_be_text_or_large_numbers(tmp_path: Path) -> None:
    def sessions(*labels: object) -> list[int]:
        body = "".join(f"{k},1,1,{label}\n" for k, label in enumerate(labels))
        path = write(tmp_path / "s.csv", "arrival_s,input_tokens,output_tokens,chat\n" + body)
        found = readers.read(path, columns="session=chat").session_ids
        assert found is not None
        return found.tolist()

    assert sessions(2**53 + 1, 5, 2**53 + 1) == [2**53 + 1, 5, 2**53 + 1]
    assert sessions("f3a-1", "0b7-9", "f3a-1") == [0, 1, 0]
    with pytest.raises(DataError, match="line 3, column 'chat': the value is missing"):
        sessions(1, "", 2)


def test_length_lists_arrive_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "lengths.csv", "input_tokens,output_tokens\n5,6\n7,0\n")
    trace = readers.read(path)
    assert trace.arrival_s.tolist() == [0.0, 0.0]
    assert trace.output_tokens.tolist() == [6, 0]


def line(time_ms: int, tokens: object = 600, blocks: str = "[1, 2]") -> str:
    return (
        f'{{"timestamp": {time_ms}, "input_length": {tokens}, "output_length": 5, '
        f'"hash_ids": {blocks}}}\n'
    )


@pytest.mark.parametrize(
    ("bad", "column", "says"),
    [
        (line(200, -1), "input_length", "'-1'"),
        ('{"timestamp": 200, "output_length": 5, "hash_ids": [1]}\n', "input_length", "missing"),
        (line(50), "timestamp", "before the one above"),
        (line(200, blocks='"a"'), "hash_ids", "not a list of block ids"),
        ('{"timestamp": 200, "input_le\n', None, "no JSON object"),
        ("17\n", None, "no JSON object"),
    ],
)
def test_a_bad_json_line_is_told_by_its_number(
    tmp_path: Path, bad: str, column: str | None, says: str
) -> None:
    path = write(tmp_path / "t.jsonl", line(0) + line(100) + bad + line(300))
    error = refused(path)
    assert error.line == 3
    assert error.column == column
    assert says in str(error)


def test_blank_lines_between_json_lines_count(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(0) + "\n\n" + line(100) + line(200, -1) + "\n")
    assert refused(path).line == 5
    path = write(tmp_path / "t.jsonl", line(0) + "\n\n" + line(100))
    assert len(readers.read(path)) == 2


def in_seconds(path: Path, rate: float, *, whole: bool = False) -> Path:
    """Prompts of 1,000 tokens at a rate, ten blocks of 16 of them shared, in seconds."""
    text = ""
    for k in range(200):
        at = round(k / rate) if whole else round(k / rate + 0.003 * (k % 2), 3)
        blocks = [*range(10), *range(100 + 60 * k, 100 + 60 * k + 52 + k % 7)]
        text += line(at, 16 * len(blocks) + k % 16, str(blocks))
    return write(path, text)


@pytest.mark.parametrize("rate", [0.9, 6.0])
def test_seconds_and_small_blocks_are_told_from_milliseconds(tmp_path: Path, rate: float) -> None:
    trace = readers.read(in_seconds(tmp_path / "t.jsonl", rate))
    assert trace.describe().rate_rps == pytest.approx(rate, rel=0.01)
    assert trace.block_tokens == 16
    assert trace.source == "file:t.jsonl, times in s, blocks of 16 tokens"
    named = "arrival=timestamp,input=input_length,output=output_length,unit=s,block=32"
    again = readers.read(tmp_path / "t.jsonl", columns=named)
    assert (again.arrival_s.tolist(), again.block_tokens) == (trace.arrival_s.tolist(), 32)


def test_a_unit_or_block_that_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    path = in_seconds(tmp_path / "t.jsonl", 0.9, whole=True)
    assert "0.9 requests/s if these are seconds, and 900" in str(refused(path))
    assert len(readers.read(path, columns="unit=s")) == 200
    odd = write(tmp_path / "odd.jsonl", line(0, 100, str([*range(9)])) + line(9, 90, "[1, 2]"))
    assert "block=16" in refused(odd).resolve


def aiperf(at_ns: int, phase: str = "profiling") -> str:
    values = {"input_sequence_length": 50, "output_sequence_length": 11}
    values |= {"time_to_first_token": 200, "request_latency": 1200}
    metadata = {"request_start_ns": at_ns, "benchmark_phase": phase}
    metrics = {name: {"value": value} for name, value in values.items()}
    return json.dumps({"metadata": metadata, "metrics": metrics, "error": None}) + "\n"


AIPERF = aiperf(10**18, "warmup") + aiperf(10**18 + 5 * 10**8) + aiperf(10**18)
LENS = {"input_lens": [50, 50, 9], "output_lens": [11, 11, 0], "errors": ["", "", "lost"]}
VLLM = LENS | {"ttfts": [0.2, 0.2, 0], "itls": [[0.1] * 10, [0.4, 0.6], []], "duration": 2.0}
GUIDE = {"prompt_tokens": 50, "output_tokens": 11}
OLD = [
    GUIDE | {"start_time": at, "first_token_time": at + 0.2, "end_time": at + 1.2}
    for at in (1e9, 1e9 + 0.5)
]
NEW = [
    GUIDE | {"request_start_time": at, "time_to_first_token_ms": 200.0, "request_latency": 1.2}
    for at in (1e9 + 0.5, 1e9)
]
USAGE = 'data: {"usage": {"prompt_tokens": 50, "completion_tokens": 11}}'
GENAI = [
    {
        "timestamp": at,
        "response_timestamps": [at + 2 * 10**8, at + 12 * 10**8],
        "response_outputs": [{"response": "data: a"}, {"response": USAGE}],
    }
    for at in (10**18, 10**18 + 5 * 10**8)
]


@pytest.mark.parametrize(
    ("written", "stamped", "left_out"),
    [
        (AIPERF, True, "1 of 3"),
        (json.dumps(VLLM | {"start_times": [7.5, 7.0, 8.0]}, indent=1), True, "1 of 3"),
        (json.dumps(VLLM) + "\n", False, "1 of 3"),
        (json.dumps({"benchmarks": [{"requests": {"successful": OLD, "errored": []}}]}), True, ""),
        (json.dumps({"benchmarks": [{"requests": {"successful": NEW}}]}), True, ""),
        (json.dumps({"experiments": [{"requests": GENAI}]}), True, ""),
    ],
    ids=["aiperf", "vllm", "sglang", "guidellm before 0.3", "guidellm", "genai-perf"],
)
def test_files_of_benchmarks(tmp_path: Path, written: str, stamped: bool, left_out: str) -> None:
    path = write(tmp_path / "result.txt", written)  # no ending tells what is in it
    trace = readers.read(path)
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 0.5] if stamped else [0.0, 0.0])
    assert trace.input_tokens.tolist() == [50, 50]
    assert trace.output_tokens.tolist() == [11, 11]
    assert trace.source == "file:result.txt" + (left_out and f", {left_out} left out")
    if stamped:
        log = ServedLog.read(path)
        assert log.ttft_s == pytest.approx([0.2, 0.2])
        assert log.tpot_s == pytest.approx([0.1, 0.1])
    else:
        assert "no times at which requests were sent" in str(refused(path, ServedLog.read))


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (json.dumps({"request_throughput": 3.0, "mean_ttft_ms": 80}), "--save-detailed"),
        (
            json.dumps({"experiments": [{"requests": [GENAI[0] | {"response_outputs": []}]}]}),
            "genai",
        ),
        (json.dumps(LENS | {"ttfts": [1, 2, 3], "itls": [1, 2, 3]}), "no lists of numbers"),
        ('{"a": [\n1,\n', "line 1"),
        ("[1, 2]", "row 1: this is no JSON object"),
        ('{"timestamp": 0, "input_length": 1' + "0" * 400 + ', "output_length": 1}', "'inf'"),
    ],
)
def test_json_that_is_no_trace_says_why(tmp_path: Path, written: str, says: str) -> None:
    assert says in str(refused(write(tmp_path / "t.json", written)))


def test_bad_rows_are_left_out_and_counted_when_asked(tmp_path: Path) -> None:
    lines = [line(0), "{cut\n", line(100, -1), line(200), line(300, blocks="7"), line(400)]
    path = write(tmp_path / "t.jsonl", "".join(lines))
    trace = readers.read(path, columns="skip-bad")
    assert trace.arrival_s.tolist() == [0.0, 0.2, 0.4]
    assert trace.source == "file:t.jsonl, 3 of 6 left out"
    with pytest.raises(DataError, match="no requests"):
        readers.read(write(tmp_path / "t.csv", AZURE + "yesterday,1,1\n"), columns="skip-bad")


@pytest.mark.parametrize("columns", ["unit=ms", "input=input_tokens,unit=s", "session=chat"])
def test_what_is_of_arrivals_needs_their_column(tmp_path: Path, columns: str) -> None:
    path = write(tmp_path / "l.csv", "input_tokens,output_tokens,chat\n10,5,a\n20,6,b\n")
    with pytest.raises(ParameterError, match="no column of arrivals is named"):
        readers.read(path, columns=columns)


def test_mooncake_lines_without_a_field_or_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"timestamp": 0, "input_length": 5}\n')
    assert refused(path).column == "output_length"
    path = write(tmp_path / "t.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1}\n')
    assert readers.read(path).prefix_ids is None
