from __future__ import annotations

import numpy as np
import pytest

from hetero.errors import DataError, FitError, ParameterError
from hetero.latency import Measurements, StepModel, read_csv
from hetero.latency.tables import one_generation
from pipelines.studies.table_reduction import reduce_table


def table(**changes):
    rows = {
        "decode": [False, True],
        "batch": [2, 4],
        "length_tokens": [100, 50],
        "seconds": [0.2, 0.1],
    }
    return Measurements(**(rows | changes))


def test_arguments_of_a_step():
    n, b, cached, pairs = table().step_arguments
    assert (n.tolist(), b.tolist(), cached.tolist()) == ([200, 4], [0, 4], [0, 200])
    assert pairs.tolist() == [2 * 100**2 / 2, 0]


def test_accuracy_of_a_step_model_per_phase():
    model = StepModel.affine(floor_s=0.1, per_token_s=1e-3, per_cached_token_s=0.0)
    accuracy = table().accuracy(model)
    assert accuracy["prefill"].mape_percent == pytest.approx(50.0)
    assert accuracy["decode"].bias_percent == pytest.approx(4.0)


@pytest.mark.parametrize(
    "changes",
    [{"seconds": [0.2]}, {"seconds": [0.2, np.nan]}, {"seconds": [0.2, 0]}, {"batch": [0, 1]}],
)
def test_impossible_tables_are_refused(changes):
    with pytest.raises(ParameterError):
        table(**changes)


def test_two_engine_generations_never_meet_in_one_fit():
    old, new = table(engine="vLLM 2023"), table(engine="vllm 0.24.0")
    assert one_generation([old, old]) == "vLLM 2023"
    with pytest.raises(FitError, match=r"2 engine generations \(vLLM 2023, vllm 0\.24\.0\)"):
        one_generation([old, new])


def test_tables_show_themselves():
    text = str(table(gpu="L4", llm="Llama-2-70B", tensor_parallel=2, engine="e", layers=1))
    assert "Llama-2-70B on L4 x2" in text
    assert "1 layer(s)" in text


HEAD = "phase,batch,input_tokens,context_tokens,output_tokens,seconds\n"


def write(tmp_path, text):
    path = tmp_path / "steps.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_with_steps_and_sums(tmp_path):
    path = write(tmp_path, HEAD + "prefill,2,128,,,0.5\nDecode,3,,64,,0.01\ndecode,4,100,,9,0.9\n")
    read = read_csv(path)
    assert read.decode.tolist() == [False, True, True]
    assert read.batch.tolist() == [2, 3, 4]
    # A sum of 9 steps after 100 tokens is 9 steps at the mean of 101..109 cached tokens.
    assert read.length_tokens.tolist() == [128, 64, 105]
    assert read.seconds == pytest.approx([0.5, 0.01, 0.1])


def test_csv_in_milliseconds_with_own_headings_blank_lines_and_spaces(tmp_path):
    path = write(tmp_path, "kind, bs, len, t\nprefill, 1, 128, 20\n\nprefill, 2, 128, 30\n")
    columns = {"phase": "kind", "batch": "bs", "input_tokens": "len", "ms": "t"}
    assert read_csv(path, columns=columns).seconds.tolist() == [0.02, 0.03]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"steps\.csv: it is empty"),
        (HEAD, "has no rows"),
        ("batch,seconds\n1,1\n", r"has no column 'phase' for phase; it has batch, seconds"),
        ("phase,batch,input_tokens\nprefill,1,1\n", "has no column 'seconds' for seconds"),
        (HEAD + "prefill,1,1,,,1\nprefil,1,1,,,1\n", r"line 3, column 'phase': 'prefil' is no"),
        (HEAD + "prefill,1,1,,,1\n\nprefill,x,1,,,1\n", r"line 4, column 'batch': 'x' is not"),
        (HEAD + "prefill,1,1,,,-2\n", r"line 2, column 'seconds': '-2' is not a number > 0"),
        (HEAD + "prefill,1,1,,,inf\n", r"line 2, column 'seconds': 'inf'"),
        (HEAD + "prefill,1,,,,1\n", r"line 2, column 'input_tokens': the value is missing"),
        (HEAD + "decode,1,5,,,1\n", r"line 2, column 'output_tokens': the value is missing"),
        (HEAD + "decode,1,5,6,7,1\n", r"line 2, column 'output_tokens': a decode row has both"),
        (HEAD + "prefill,0,1,,,1\n", r"line 2, column 'batch': '0' is not a number >= 1"),
    ],
)
def test_bad_files_name_line_and_column(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_csv(write(tmp_path, text))


def test_unknown_and_missing_mappings(tmp_path):
    path = write(tmp_path, HEAD + "prefill,1,1,,,1\n")
    with pytest.raises(ParameterError, match="'size' is no column"):
        read_csv(path, columns={"size": "bs"})
    with pytest.raises(DataError, match="has no column 'bs' for batch"):
        read_csv(path, columns={"batch": "bs"})
    with pytest.raises(DataError, match="there is no such file"):
        read_csv(tmp_path / "none.csv")


def test_reduction_needs_decode_steps_at_two_lengths():
    prefill = table(decode=[False, False])
    with pytest.raises(FitError, match="needs decode steps"):
        reduce_table(prefill)
    with pytest.raises(FitError, match="no batch was measured at two cached lengths"):
        reduce_table(table())


def test_reduction_shares_the_rate_of_the_nearest_batch():
    cached = Measurements(
        decode=[True] * 3 + [False],
        batch=[1, 1, 4, 1],
        length_tokens=[100, 300, 100, 512],
        seconds=[0.011, 0.013, 0.016, 0.1],
    )
    piece = reduce_table(cached).model.pieces[0]
    assert piece.per_cached_token_s == pytest.approx([1e-5] * 4)
    assert piece.knots_tokens.tolist() == [1, 4, 512]
    assert piece.knots_s == pytest.approx([0.010, 0.012, 0.1])
