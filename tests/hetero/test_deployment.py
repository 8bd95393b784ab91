from __future__ import annotations

from dataclasses import replace

import pytest

from hetero import catalog
from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.errors import ParameterError
from hetero.latency.step import StepModel

STEP = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
P = Replica("p", STEP, 1000, role="prefill")
D = Replica("d", STEP, 1000, role="decode")
B = Replica("b", STEP, 1000)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Engine(max_batch=0), "max_batch must be at least 1"),
        (lambda: Engine(block_tokens=-1), "block_tokens must be at least 1"),
        (lambda: Engine(swap_s_per_gb=float("nan")), "swap_s_per_gb is"),
        (lambda: Engine(prefix_cache=True), "holds blocks of a paged KV cache"),
        (lambda: Engine(batching="static", admission="paged"), "needs admission 'known'"),
        (lambda: replace(B, kv_tokens=0), "KV cache of 0 tokens"),
        (lambda: replace(B, kv_tokens=8, engine=Engine(admission="paged")), "at least 16 tokens"),
        (lambda: replace(P, engine=Engine(batching="static")), "only prefill in static batches"),
        (lambda: KvLink(0.0), "bandwidth above 0"),
        (lambda: Deployment("none", ()), "it has none"),
        (lambda: Deployment("two", (B, B)), "'b' stands twice"),
        (lambda: Deployment("half", (P, B)), "serve only prefill"),
        (lambda: Deployment("half", (D,)), "serve only decode"),
        (lambda: Deployment("unlinked", (P, D)), "No KV link from p to d"),
        (lambda: Deployment("back", (P, D), (("d", "p", KvLink(1.0)),)), "from 'd' to 'p'"),
        (lambda: Deployment("far", (P, D), (("p", "x", KvLink(1.0)),)), "from 'p' to 'x'"),
    ],
)
def test_what_cannot_be_says_so(make, words) -> None:
    with pytest.raises(ParameterError, match=words):
        make()


def test_links_of_their_own_or_one_for_all() -> None:
    link = KvLink(10.0, latency_s=1e-3, compression=0.25)
    assert Deployment("pair", (P, D), (("p", "d", link),)).links[0][2] is link
    assert Deployment("pair", (P, D, B), default_link=link).default_link is link


def test_table_and_price() -> None:
    gpu = catalog.gpu("A100-SXM-80GB")
    priced = [replace(B, name=f"r{k}", gpu=gpu, gpus=2, usd_per_h=4.0) for k in range(3)]
    fleet = Deployment("fleet", tuple(priced))
    assert fleet.usd_per_h == 12.0
    assert "2 x A100-SXM-80GB" in str(fleet)
    assert Deployment("mixed", (*priced, B)).usd_per_h is None
