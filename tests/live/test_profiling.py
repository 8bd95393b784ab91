"""`hetero profile` against a real engine, and against servers that fail in known ways."""

from __future__ import annotations

import csv
import http.server
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hetero import latency
from hetero.apps import profiling
from hetero.apps.cli import main
from hetero.apps.profiling import Endpoint, ProfileLimits, Reply, Setting
from hetero.apps.profiling.rounds import steps
from hetero.errors import DataError, EndpointError, ParameterError
from tests.serving import Paced, running

SETTINGS = profiling.grid([1, 2, 3], [16, 64], [12])


def test_a_profile_of_a_real_engine_is_fitted(small_engine, tmp_path, capsys):
    file, fit = tmp_path / "steps.csv", tmp_path / "model.json"
    call = [
        *("profile", small_engine.url, "--model", small_engine.model, "--output", str(file)),
        *("--batch", "1,2,3", "--input", "16,64", "--tokens", "64", "--repeats", "2"),
        *("--fit", str(fit), "--check", "5"),
    ]
    with pytest.raises(SystemExit) as done:
        main(call)
    assert done.value.code == 0
    shown = capsys.readouterr()
    assert "12/12" in shown.err
    assert "p1" in shown.out
    assert "still due" in shown.out
    measured = latency.read_csv(file)
    prefill = measured.phase("prefill")
    assert sorted(set(prefill.batch)) == [1, 2, 3]
    # A word has five tokens, so prompts come within three tokens of what was asked for.
    lengths = prefill.length_tokens
    assert np.all(np.minimum(np.abs(lengths - 16), np.abs(lengths - 64)) <= 3)
    # Requests of a very small model may end before the next one starts, on a busy machine, and
    # then show no step of them all. One alone always does.
    assert np.sum(measured.phase("decode").batch == 1) == 4
    step = latency.storage.load(fit)
    assert step.seconds(64.0, 0.0, 0.0, 0.0) > 0
    # Fresh rounds stand in the file, in the table, and in no fit.
    assert "Check on fresh rounds" in shown.out
    fresh = latency.read_csv(file, kept_for="check").phase("prefill")
    assert len(fresh.batch) == 5
    assert len(prefill.batch) == 12
    marked = [row["kept_for"] for row in csv.DictReader(file.open())]
    assert marked == sorted(marked, reverse=True)
    result = profiling.checked(file, step)
    expected = step.seconds(*fresh.step_arguments)
    error = 100 * np.mean(np.abs(expected / fresh.seconds - 1))
    assert result.accuracy["prefill"].mape_percent == pytest.approx(error)
    assert f"{error:.3g}" in str(result)


def test_a_stopped_profile_goes_on_without_asking_again(small_engine, tmp_path):
    file = tmp_path / "steps.csv"
    endpoint = Endpoint(small_engine.url, small_engine.model)
    first = profiling.profile(
        endpoint, SETTINGS, file, repeats=1, warm_up=0, limits=ProfileLimits(tokens=800)
    )
    assert 0 < first.done < first.planned == 6
    assert "800 tokens" in first.stopped
    kept = file.read_text()
    file.write_text(kept + "decode,2,,33")  # what a crash may leave
    second = profiling.profile(endpoint, SETTINGS, file, repeats=1, warm_up=0)
    assert second.sent == second.planned - first.done
    assert file.read_text().startswith(kept)
    rows = [row for row in csv.DictReader(file.open()) if row["phase"] == "prefill"]
    asked = [(row["batch"], row["asked_input_tokens"]) for row in rows]
    assert len(asked) == len(set(asked)) == 6
    assert profiling.profile(endpoint, SETTINGS, file, repeats=1).sent == 0
    with pytest.raises(DataError, match="not of 'other'"):
        profiling.profile(Endpoint(small_engine.url, "other"), SETTINGS, file)


def test_a_profile_from_before_checks_goes_on(small_engine, tmp_path):
    file = tmp_path / "steps.csv"
    endpoint = Endpoint(small_engine.url, small_engine.model)
    profiling.profile(endpoint, SETTINGS[:2], file, repeats=1, warm_up=0)
    file.write_text(file.read_text().replace(",kept_for\n", "\n").replace(",fit\n", "\n"))
    found = profiling.profile(endpoint, SETTINGS[:3], file, repeats=1, warm_up=0)
    assert found.sent == 1
    assert {row["kept_for"] for row in csv.DictReader(file.open())} == {"fit"}
    with pytest.raises(DataError, match="no rows kept for a check"):
        profiling.checked(file, latency.StepModel.affine(
            floor_s=1.0, per_token_s=0.0, per_cached_token_s=0.0
        ))  # fmt: skip
    spent = profiling.profile(
        endpoint, SETTINGS, file, repeats=1, warm_up=0, limits=ProfileLimits(tokens=1000),
        after=profiling.Profile(file, 0, 0, 0, "", tokens=999.0),
    )  # fmt: skip
    assert spent.sent == 0
    assert "1000 tokens" in spent.stopped


def test_fresh_settings_are_between_and_beside_the_measured_ones():
    fresh = profiling.between(SETTINGS, 40, seed=1)
    assert len(fresh) == 40
    assert not {(s.batch, s.input_tokens) for s in fresh} & {
        (s.batch, s.input_tokens) for s in SETTINGS
    }
    assert max(s.batch for s in fresh) == 3
    assert 12 <= min(s.input_tokens for s in fresh) < 16
    assert 64 < max(s.input_tokens for s in fresh) <= 80
    assert fresh == profiling.between(SETTINGS, 40, seed=1) != profiling.between(SETTINGS, 40)
    with pytest.raises(ParameterError, match="check nothing"):
        profiling.between(SETTINGS, 0)
    with pytest.raises(ParameterError, match="no 9 settings"):
        profiling.between([Setting(1, 1, 8)], 9)


def test_a_server_that_dies_leaves_the_rounds_that_ended(tmp_path):
    file = tmp_path / "steps.csv"
    served = Paced(step_ms=5)
    with running(served):
        lines: list[str] = []

        def kill_after_two(line: str) -> None:
            lines.append(line)
            if len(lines) == 2:
                served.signal(signal.SIGKILL)

        with pytest.raises(EndpointError, match=r"cannot be reached|broke off"):
            profiling.profile(
                Endpoint(served.url, "m"),
                SETTINGS,
                file,
                repeats=1,
                progress=kill_after_two,
            )
    rows = list(csv.DictReader(file.open()))
    assert sum(row["phase"] == "prefill" for row in rows) == 2


@contextmanager
def answering(
    answer: Callable[[http.server.BaseHTTPRequestHandler, bytes], object],
) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self, self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _send(status: int, kind: str, body: bytes, length: int | None = None):
    def answer(handler: http.server.BaseHTTPRequestHandler, _: bytes = b"") -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


PIECE = b'data: {"id":"1","object":"text_completion","created":0,"model":"m",'
TEXT = PIECE + b'"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
END = PIECE + b'"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
JSON, STREAM = "application/json", "text/event-stream"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_send(500, JSON, b'{"error":{"message":"out of memory"}}'), "status 500.*out of memory"),
        (_send(429, JSON, b'{"error":{"message":"slow down"}}'), "limits the rate.*slow down"),
        (_send(401, JSON, b'{"error":{"message":"who"}}'), "refuses the key"),
        (_send(404, JSON, b'{"error":{"message":"none"}}'), "has no model 'm'"),
        (_send(200, JSON, b'{"choices":[{"text":"whole"}]}'), "without streaming"),
        (_send(200, STREAM, TEXT + TEXT, length=10_000), "broke off"),
        (_send(200, STREAM, TEXT + b"data: [DONE]\n\n"), "broke off after 1 pieces"),
        (_send(200, STREAM, TEXT + END), "does not say how many tokens"),
        (_send(200, STREAM, END), "without any text"),
    ],
)
def test_what_a_server_does_wrong_is_said(answer, says, tmp_path):
    with (
        answering(answer) as url,
        pytest.raises(EndpointError, match=says) as failed,
    ):
        profiling.profile(Endpoint(url, "m", timeout_s=300), SETTINGS, tmp_path / "steps.csv")
    assert "Resolve:" in str(failed.value)
    assert not (tmp_path / "steps.csv").exists()


def test_a_silent_server_and_an_empty_port_are_told_apart(tmp_path):
    hold = threading.Event()
    with answering(lambda *_: hold.wait(600)) as url:
        with pytest.raises(EndpointError, match=r"sent nothing for 0\.3 s"):
            profiling.profile(Endpoint(url, "m", timeout_s=0.3), SETTINGS, tmp_path / "a.csv")
        hold.set()
    with pytest.raises(EndpointError, match="cannot be reached"):
        profiling.profile(Endpoint(url, "m"), SETTINGS, tmp_path / "a.csv")


def test_an_engine_that_refuses_ignore_eos_is_asked_without(tmp_path):
    bodies: list[bytes] = []
    usage = PIECE + b'"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":2,'
    usage += b'"total_tokens":3}}\n\n'

    def answer(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        bodies.append(body)
        if b"ignore_eos" in body:
            _send(400, JSON, b'{"error":{"message":"unknown field"}}')(handler)
        else:
            _send(200, STREAM, TEXT + TEXT + usage % len(body) + END)(handler)

    with answering(answer) as url:
        setting = Setting(1, 8, 8)
        found = profiling.profile(Endpoint(url, "m"), [setting], tmp_path / "a.csv", repeats=1)
    assert found.done == 1
    assert [b"ignore_eos" in body for body in bodies] == [True, False, False, False, False]


def test_steps_of_requests_that_started_apart():
    # Two prefills one after the other, then steps of 0.1 s; pieces of two tokens each.
    first = Reply(100, 12, 10.0, (11.0, 12.1, 12.2, 12.3, 12.4, 12.5))
    second = Reply(200, 12, 10.0, (12.0, 12.1, 12.2, 12.3, 12.4, 12.5))
    found = steps([first, second])
    assert found.prefill_s == 2.0
    assert found.decode_s == pytest.approx(0.05)
    assert found.input_tokens == 150
    assert found.context_tokens == pytest.approx(150 + (1 + 6) / 2 * 2)
    assert steps([Reply(1, 1, 0.0, (1.0,))]).decode_s is None


def test_settings_and_limits_that_measure_nothing_are_refused(tmp_path):
    with pytest.raises(ParameterError, match="no step times"):
        Setting(1, 16, 2)
    with pytest.raises(ParameterError, match="allow nothing"):
        ProfileLimits(seconds=0)
    with pytest.raises(ParameterError, match="no address"):
        Endpoint("localhost:8000", "m")
    with pytest.raises(ParameterError, match="measures nothing"):
        profiling.profile(Endpoint("http://x", "m"), [], tmp_path / "a.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="something else"):
        profiling.profile(Endpoint("http://x", "m"), SETTINGS, tmp_path / "other.csv")


def measured(
    folder: Path,
    lengths: tuple[int, ...],
    scatter: float,
    seconds: Callable[[int, int], tuple[float, float]],
) -> Path:
    """A profile of prefills and decode steps that take given times and scatter."""
    rng, file = np.random.default_rng(0), folder / "steps.csv"
    lines = ["phase,batch,input_tokens,context_tokens,seconds"]
    for batch, length in product((1, 2, 4, 8), lengths):
        prefill, decode = seconds(batch, batch * length)
        for noise in 1 + scatter * rng.standard_normal(2):
            lines.append(f"prefill,{batch},{length},,{prefill * noise}")
            lines.append(f"decode,{batch},,{length},{decode * noise}")
    file.write_text("\n".join(lines) + "\n")
    return file


def test_the_bent_form_wins_where_prefill_is_quadratic(tmp_path):
    file = measured(
        tmp_path,
        (64, 256, 1024),
        0.01,
        lambda batch, n: (5e-3 + 1e-5 * n + 2e-8 * n * n, 2e-3 + 1e-7 * n + 1e-4 * batch),
    )
    found = profiling.fitted(file, wanted_percent=2.0)
    assert found.form == "bent"
    assert found.held_out_percent["bent"] < 2 < found.held_out_percent["affine"]
    n = np.array([100.0, 1000.0, 8000.0])
    truth = 5e-3 + 1e-5 * n + 2e-8 * n * n
    assert np.allclose(found.step.seconds(n, 0 * n, 0 * n, 0 * n), truth, rtol=0.03)
    decode = next(one for one in found.precision if one.phase == "decode")
    assert decode.percent < 2
    assert decode.needed <= decode.rows


def test_engines_that_attend_to_the_whole_batch_are_bent_in_both_phases(tmp_path):
    def seconds(batch: int, n: int) -> tuple[float, float]:
        prefill = 5e-3 + 1e-4 * n + 2e-7 * n * n
        return prefill, 4e-3 + 5e-4 * batch + 1e-6 * n + 2e-7 * batch * n

    found = profiling.fitted(measured(tmp_path, (32, 128, 512), 0.005, seconds))
    assert (found.form, found.decode_form) == ("bent", "bent")
    assert found.decode_held_out_percent["bent"] < 1 < found.decode_held_out_percent["affine"]
    batch, cached = np.array([2.0, 8.0, 8.0]), np.array([100.0, 400.0, 4000.0])
    truth = 4e-3 + 5e-4 * batch + 1e-6 * cached + 2e-7 * batch * cached
    steps = found.step.seconds(batch, batch.astype(int), cached, 0 * cached)
    assert np.allclose(steps, truth, rtol=0.02)
    # A prompt beside decoding requests attends to their caches as well.
    alone = found.step.seconds(200, 0, 0, 0)
    mean = float(np.mean([32, 128, 512]))
    beside = found.step.seconds(200 + 4, 4, 4 * mean, 0)
    apart = alone + found.step.seconds(4, 4, 4 * mean, 0) - found.step.seconds(0, 0, 0, 0)
    assert beside - apart == pytest.approx(2e-7 * 200 * 4 * mean, rel=0.3)
