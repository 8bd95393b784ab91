"""`hetero serve` in front of two real engines: the official client."""

from __future__ import annotations

import pytest

from pipelines.bench.engines import engine, write_model
from tests.serving import Served, running

# An engine that computes answers nothing else, and on a busy machine not for long.
PATIENT = {"health_timeout_s": 300.0, "token_s": 600.0, "connect_s": 300.0, "queue_s": 600.0}


@pytest.fixture(scope="module")
def served(tmp_path_factory, small_engine):
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
        one = Served(folder, urls, models=models, router="workload", limits=PATIENT)
        with running(one):
            yield one


def test_the_official_client_works_unchanged(served):
    import openai

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
    assert {piece.model for piece in pieces} == {"m"}
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
