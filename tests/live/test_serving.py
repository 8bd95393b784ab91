"""`hetero serve` in front of two real engines: the official client, and a replayed trace."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero.apps.cli import main
from hetero.workload import Trace
from pipelines.bench.engines import engine, write_model
from tests.serving import Served, running

# An engine that computes answers nothing else, and on a busy machine not for long.
PATIENT = {"health_timeout_s": 300.0, "token_s": 600.0, "connect_s": 300.0, "queue_s": 600.0}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, small_engine):
    import openai

    folder = tmp_path_factory.mktemp("fleet")
    write_model(folder, hidden=128, layers=4)
    with engine(folder) as large:
        small = small_engine
        for one in (small, large):
            # The first request takes such an engine seconds, in which it answers nothing else.
            with openai.OpenAI(base_url=f"{one.url}/v1", api_key="none") as client:
                client.completions.create(model=one.model, prompt="hello", max_tokens=2)
        urls = {"small": small.url, "large": large.url}
        models = {"small": small.model, "large": large.model}
        served = Served(folder, urls, models=models, router="workload", limits=PATIENT)
        with running(served):
            yield served, urls, models


def test_the_official_client_works_unchanged(fleet):
    import openai

    served, _, _ = fleet
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600)
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    chat = [{"role": "user", "content": "hello there"}]
    whole = client.chat.completions.create(model="m", messages=chat, max_tokens=8)
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].message.content
    pieces = list(
        client.chat.completions.create(model="m", messages=chat, max_tokens=8, stream=True)
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert all(piece.usage is None or piece.choices for piece in pieces)  # not asked for
    assert pieces[-1].choices[0].finish_reason == "length"
    counted = list(
        client.completions.create(
            model="m",
            prompt="one two three",
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert counted[-1].usage.completion_tokens == 8
    done = client.completions.create(model="m", prompt="one two three", max_tokens=8)
    assert done.usage.prompt_tokens == counted[-1].usage.prompt_tokens > 0
    with pytest.raises(openai.NotFoundError, match="There is no model 'other'"):
        client.completions.create(model="other", prompt="x")
    metrics = served.metrics()
    assert served.outcomes() == {"finished": 4, "failed": 0, "cancelled": 0, "refused": 1}
    tokens = sum(v for k, v in metrics.items() if "hetero_tokens_total" in k and "output" in k)
    assert tokens == 4 * 8


def test_a_trace_is_replayed(fleet, tmp_path, capsys):
    served, urls, models = fleet
    rng = np.random.default_rng(0)
    gaps = rng.exponential(0.1, 20)
    gaps[10] = 100.0  # half come at once; the others may not be sent any more
    trace = Trace(np.cumsum(gaps), rng.integers(20, 200, 20), rng.integers(2, 20, 20))
    trace.to_csv(tmp_path / "trace.csv")
    table = tmp_path / "requests.csv"
    served.write(urls, models=models, router="workload", limits=PATIENT)

    def call(*more):
        arguments = [str(tmp_path / "trace.csv"), served.url, "--model", "m", "-o", str(table)]
        with pytest.raises(SystemExit) as done:
            main(["replay", *arguments, "--deployment", str(served.file), "--rate", "0.2", *more])
        return done.value.code, capsys.readouterr().out

    code, said = call("--max-seconds", "50")
    assert code == 0
    assert "10 rows written" in said
    assert "10 requests were not sent" in said
    code, said = call("--force")
    assert code == 0
    assert "20 rows written" in said
    rows = pd.read_csv(table, keep_default_na=False, na_values=[""])
    assert list(rows.status) == ["finished"] * 20
    assert set(rows.replica) <= {"small", "large"}
    assert list(rows.output_tokens) == list(trace.output_tokens)
    # Words have five tokens or so, and prompts come out within a word or two.
    assert np.all(np.abs(rows.input_tokens - trace.input_tokens) <= 10)
    assert np.all(rows.ttft_s > 0)
    assert np.all(rows.e2e_s >= rows.ttft_s)
    assert np.allclose(np.diff(rows.arrival_s).mean(), 1 / 0.2, rtol=0.02)
