from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.apps.serving import load
from hetero.apps.serving.bodies import Events, LengthEstimates, size
from hetero.apps.serving.dispatcher import Dispatcher, Prepared
from hetero.errors import DataError, ParameterError
from hetero.latency import storage
from hetero.latency.step import StepModel

TEXT = """
model: tiny
router: {name: workload, theta: 3}
backends:
  - {name: a, url: "http://127.0.0.1:1/v1/", step: s.json, kv_tokens: 1000}
  - {name: b, url: "http://127.0.0.1:2", step: s.json, kv_tokens: 500, max_batch: 4,
     gpu: A100-SXM-80GB}
"""


@pytest.fixture
def folder(tmp_path):
    step = StepModel.affine(floor_s=0.01, per_token_s=1e-5, per_cached_token_s=1e-8)
    storage.save(step, tmp_path / "s.json")
    return tmp_path


def test_a_deployment_file_becomes_a_deployment(folder, monkeypatch):
    file = folder / "d.yaml"
    file.write_text(TEXT + "api_keys_env: HETERO_TEST_KEYS\n")
    settings = load(file)
    assert settings.host == "127.0.0.1"
    assert settings.backends[0].url == "http://127.0.0.1:1"
    assert settings.chosen().theta == 3
    a, b = settings.deployment().replicas
    assert (a.kv_tokens, b.kv_tokens, b.engine.max_batch) == (1000, 500, 4)
    assert b.gpu.name == "A100-SXM-80GB"
    with pytest.raises(ParameterError, match="holds no key"):
        settings.keys()
    monkeypatch.setenv("HETERO_TEST_KEYS", "x, y")
    assert settings.keys() == {b"x": "key 1", b"y": "key 2"}


def test_a_reload_keeps_what_is_known_of_engines_that_stay(folder):
    file = folder / "d.yaml"
    file.write_text(TEXT)
    dispatcher = Dispatcher(Prepared.of(load(file)))
    gone, kept = dispatcher.engines
    file.write_text(TEXT.replace("name: a", "name: c"))
    asyncio.run(dispatcher.change(lambda: load(file)))
    assert [one.backend.name for one in dispatcher.engines] == ["c", "b"]
    assert dispatcher.engines[1] is kept  # with its circuit breaker and its requests
    assert gone.position == -1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (TEXT[TEXT.index("backends") :], "", "backends: missing"),
        ("model: tiny", "model: [", "Not valid YAML"),
        (TEXT, '{"format": "hetero plan card"}', "is a plan card. Resolve: say `hetero export"),
        ("kv_tokens: 500", "kv_tokens: 0", r"backends\.1\.kv_tokens"),
        ("name: b", "name: a", "stands twice"),
        ("theta: 3", "theta: -3", "theta"),
        ("theta: 3", "depth: 3", "does not take"),
        ("workload", "worklode", "No router is called"),
        ("{name: workload, theta: 3}", "heteroserve", "names no GPU"),
        ("http://127.0.0.1:2", "127.0.0.1:2", "scheme"),
        ("s.json", "t.json", "cannot be read"),
        ("s.json", "/dev/zero", "cannot be read .it is no regular file"),
        ("http://127.0.0.1:2", "http://a%zz:2", "with a host"),
        (
            TEXT,
            "backends: [{name: a}, {name: b, url: x}]",
            r"model, backends\.0\.url, backends\.0\.kv_tokens, .*: missing; .*1\.url: write the",
        ),
        ("max_batch: 4", "max_bach: 4", "max_bach"),
        ("max_batch: 4", "model: x, models: {y: z}", "either model or models"),
        ("http://127.0.0.1:2", "http://:2", "with a host"),
        ("model: tiny", "model: 2001-99-99", "cannot be read"),
        ("model: tiny", f"seed: {'9' * 5000}", "cannot be read"),
        ("model: tiny", "model: !!float x", "cannot be read"),
        ("model: tiny", f"model: {'[' * 3000}", "nested too deep"),
        ("model: tiny", "a: &a [x]\nb: *a", "aliases"),
        ("model: tiny", f"model: [{'1, ' * 100_000}]", "characters"),
        ("model: tiny", 'model: "a\\nb"', "line break"),
        ("model: tiny", "model: tiny\nseed: -1", "seed"),
        ("model: tiny", "model: tiny\nworkers: 2", "workers: Extra inputs"),
        ("kv_tokens: 500", f"kv_tokens: {10**20}", r"backends\.1\.kv_tokens"),
        ("kv_tokens: 500", f"kv_tokens: {2**31}", r"backends\.1\.kv_tokens"),
        ("max_batch: 4", f"max_batch: {2**40}", r"backends\.1\.max_batch"),
        ("max_batch: 4", f"max_batch: {2**70}", r"backends\.1\.max_batch"),
        ("max_batch: 4", f"block_tokens: {2**40}", r"backends\.1\.block_tokens"),
        ("model: tiny", "model: tiny\noutputs: none", "outputs: "),
        ("model: tiny", "model: tiny\nlimits: {token_s: .inf}", r"limits\.token_s"),
    ],
)
def test_what_a_file_gets_wrong_is_said(folder, old, new, says):
    file = folder / "d.yaml"
    file.write_text(TEXT.replace(old, new))
    with pytest.raises(DataError, match=says) as failed:
        load(file)
    assert "Resolve:" in str(failed.value)


def test_what_check_accepts_is_what_starts(folder, monkeypatch, said, refused):
    file = folder / "d.yaml"
    file.write_text(TEXT)
    assert "Router: workload" in said("serve", file, "--check")
    file.write_text(TEXT + "api_keys_env: HETERO_TEST_KEYS\n")
    monkeypatch.delenv("HETERO_TEST_KEYS", raising=False)
    assert "holds no key" in refused("serve", file, "--check")


def test_prompts_are_learnt_from_what_engines_count():
    lengths = LengthEstimates("recent")
    body = {
        "messages": [{"content": "a" * 300}, {"content": [{"type": "text", "text": "b" * 300}]}]
    }
    prompt = size(body)
    assert lengths.prompt(prompt) == 150
    assert lengths.output(500) == 256
    for k in range(100):
        lengths.learn(prompt, 300, 10 + k % 3)
    assert abs(lengths.prompt(prompt) - 300) <= 3
    assert lengths.output(500) == 11
    assert lengths.output(5, 2) == 10
    assert lengths.output(500, endless=True) == 500


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_streams_are_read_alike_however_they_are_cut(cut):
    said = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\r\n\r\n'
        b": a comment\n\n"
        b'data: {"choices":[{"delta":{"content":"the \\"usage\\" of it"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    )
    counts = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
    end = b"data: [DONE]\n\n"
    whole = said + counts + end
    for keep, passed in ((False, said + end), (True, whole)):
        events = Events(keep_usage=keep)
        got = b"".join(events.feed(whole[k : k + cut]) for k in range(0, len(whole), cut))
        assert got == passed
        assert (events.finished, events.done, events.error) == (True, True, "")
        assert (events.usage.input_tokens, events.usage.output_tokens) == (9, 2)
        assert events.pieces == 3
    broken = Events(keep_usage=False)
    assert broken.feed(b'data: {"error":{"message":"out of memory"}}\n\n') == b""
    assert broken.error == "out of memory"
