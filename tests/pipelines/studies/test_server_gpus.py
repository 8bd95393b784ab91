"""Efficiencies from runs of servers: what made the runs comes back, and who takes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hetero import paths
from hetero.catalog import gpu, llm
from hetero.latency.models.efficiencies import efficiency, sources
from hetero.latency.models.roofline import VALUES, Efficiency
from hetero.latency.resolve import resolve
from hetero.workload import Trace
from pipelines.studies import server_gpus, servers
from pipelines.studies.server_gpus import Group, fitted

FREE = ("compute_efficiency", "bandwidth_efficiency")


def runs_of(truth: Efficiency) -> tuple[servers.ServerRun, ...]:
    """Static batches of two models whose times are those of some efficiencies."""
    found = []
    for name, batch, tokens in (
        *(("Llama-3-8B", batch, tokens) for batch in (1, 16) for tokens in (128, 512)),
        *(("Mistral-7B", batch, tokens) for batch in (1, 32) for tokens in (128, 512)),
    ):
        trace = Trace(np.zeros(batch), np.full(batch, tokens), np.full(batch, 32), name="batch")
        run = servers.ServerRun(
            *("made", "none", "A10G", llm(name), 1, f"{batch} of {tokens}", trace, {"e2e_s": 1.0}),
            statistic="last",
            family="any",
        )
        (log,) = server_gpus.logs(Group("A10G", "made", "test"), [run], truth)["log"]
        found.append(replace(run, measured={"e2e_s": float(np.exp(log))}))
    return tuple(found)


def test_what_made_the_runs_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # With few padding tokens, so that weights bound small batches and products large ones.
    lent = replace(efficiency(gpu("A10G"), "median"), padding_tokens=4.0)
    truth = replace(lent, compute_efficiency=0.5, bandwidth_efficiency=0.6)
    made = runs_of(truth)
    monkeypatch.setattr(servers, "runs", lambda source: made)
    group = Group("A10G", "made", "a test", free=FREE)
    # Everything else is as it was when the runs were made.
    monkeypatch.setattr(Group, "lent", lambda self: lent)
    for without in ("", "Mistral-7B"):  # the prior draws to the 0.69 and 0.83 that others lend
        values, silent = fitted(group, without)
        assert values.compute_efficiency == pytest.approx(0.5, rel=0.15)
        assert values.bandwidth_efficiency == pytest.approx(0.6, rel=0.15)
        assert not silent
    assert server_gpus.left_out(replace(made[0], gpu="H100-SXM"), "llm") is None


def test_who_takes_them() -> None:
    eight, mixture = llm("Llama-3-8B"), llm("Mixtral-8x7B")
    assert [resolve(gpu(name), eight).kind for name in ("A10G", "Gaudi2")] == ["calibrated"] * 2
    assert sources("MI300X") == ()
    old, new = (resolve(gpu("MI300X"), eight, 2, release=one) for one in ("0.6.3", "0.19"))
    assert (old.kind, new.kind) == ("calibrated", "assumed")
    assert "vllm 0.4-0.6" in old.step.source
    assert resolve(gpu("MI300X"), mixture, 2, release="0.6.3").kind == "assumed"
    assert resolve(gpu("MI325X"), eight, 2, release="0.6.3").kind == "same chip"
    assert resolve(gpu("RTX-4090"), llm("Qwen2.5-7B"), 2).kind == "same chip"
    one, several = (resolve(gpu("RTX-4090"), llm("Qwen2.5-7B"), n).kernels.source for n in (1, 2))
    assert "servers" not in one
    assert "several" in several


def test_of_several_gpus_the_rest_is_that_of_one() -> None:
    one, several = (efficiency(gpu("RTX-4090"), source) for source in (None, "several"))
    for name in VALUES:
        same = getattr(one, name) == getattr(several, name)
        assert same == (name not in server_gpus.LINK), name


def test_left_out_models_err_less_than_with_the_gpu_left_out() -> None:
    """Of several RTX 4090, whose hosts differ, only the largest errors are smaller."""
    frame = pd.read_csv(paths.data("measured", "servers_held_out.csv"))
    for group in server_gpus.GROUPS:
        own = frame[(frame["gpu"] == group.gpu) & (frame["degree"] >= group.least_degree)]
        own = own[own["source"].str.startswith(group.source.split()[0])]
        assert set(own["test"]) == {"gpu", "llm"}
        size = own["step"].abs().groupby(own["test"])
        found = size.quantile(0.95) if group.grid == "several" else size.mean()
        assert found["llm"] < found["gpu"], group.gpu
