"""One replica has the same step times, room, limits and predictor at every entry point."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetero
from hetero import catalog, workload
from hetero.apps.answers.fleets import record
from hetero.apps.cards.request import request
from hetero.apps.explorer import explore
from hetero.apps.serving.deployment_file import write
from hetero.cluster import Cluster, Machine, cluster
from hetero.deployment import Replica
from hetero.planners.xiong import plan as xiong
from hetero.routers import LeastTokens, Oracle, Predictive
from hetero.routers.base import DEFAULT
from hetero.simulator import Slo

CHATS = workload.load("azure2023_conv").head(400)
CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("H100-SXM", 1, "Llama-3.1-8B", {}),
    ("RTX-PRO-6000-Server", 1, "Llama-3.1-8B", {}),  # a layer profile, whose batches are ragged
    ("L4", 2, "Llama-3.1-8B", {}),
    ("A100-SXM-80GB", 2, "Llama-3.1-70B", {"precision": "int4"}),
    ("MI300X", 1, "Qwen2.5-14B", {"engine": "vllm@0.6.3"}),
    ("H100-SXM", 2, "Qwen2.5-14B", {"engine": "sglang", "precision": "fp8"}),
    ("L40S", 2, "Qwen2.5-7B", {"engine": "trtllm", "kv_precision": "fp8"}),
    ("A40", 1, "Llama-3-8B", {"engine": "any"}),
    ("H100-SXM", 1, "Qwen3-30B-A3B", {"memory": 0.85, "schedule_ahead": False}),
    ("H200-SXM", 1, "gpt-oss-20b", {"chunk": 1024, "prefix_cache": False}),
]


def does(one: Replica) -> tuple[float, ...]:
    """What a replica does and holds."""
    n, b = np.array([1.0, 40.0, 700.0, 5000.0]), np.array([1, 40, 60, 0])
    limits = (one.engine.max_batch, one.engine.max_step_tokens)
    return (*one.step.seconds(n, b, 900.0 * b, n).tolist(), one.kv_tokens, *limits)


def options(own: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in own.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


@pytest.mark.parametrize(("gpu", "count", "model", "own"), CASES)
def test_every_entry_point_gives_one_replica_the_same(
    gpu, count, model, own, tmp_path, told
) -> None:
    fleet, llm = Cluster("one", (Machine("m", catalog.gpu(gpu), count),)), catalog.llm(model)
    question = request(fleet, model=llm, trace=CHATS, slo="ttft=2s", rate=1.0, **own).question
    planned = xiong.plan(question).deployment
    assert planned is not None
    here, degree = planned.replicas[0], count // len(planned.replicas)
    known = hetero.replicated(fleet, llm, {"m": degree}, question.engine, trace=question.trace)
    assert does(known.replicas[0]) == pytest.approx(does(here), rel=1e-6)
    assert known.replicas[0].engine == here.engine
    served = write(known, tmp_path / "d.yaml", model="m", router=LeastTokens()).deployment()
    assert does(served.replicas[0]) == pytest.approx(does(here), rel=1e-6)
    compared = hetero.compare(known, [LeastTokens()], CHATS.head(40), seeds=1, resample=False)
    run = hetero.simulate(known, CHATS.head(40), LeastTokens())
    assert compared.frame["ttft_mean_s"].iloc[0] == hetero.metrics(run).means["ttft_s"]
    if not own:
        explored = explore(fleet, question.trace, 1.0, Slo(), llm=llm).run.deployment
        assert does(explored.replicas[0]) == pytest.approx(does(known.replicas[0]), rel=1e-6)
    (tmp_path / "f.yaml").write_text(f"machines: [{{name: m, gpu: {gpu}, count: {count}}}]\n")
    words = [tmp_path / "f.yaml", "--model", model, "--degree", degree, "--requests", "9"]
    said = told("simulate", *words, "--router", "least-tokens", *options(own))
    notes = " ".join(said["notes"])
    kv, batch, tokens = (
        int(re.search(pattern, notes)[1].replace(",", ""))
        for pattern in (r": ([\d,]+) tokens", r"most ([\d,]+) req", r"and ([\d,]+) tokens a step")
    )
    assert (batch, tokens) == (here.engine.max_batch, does(here)[-1])
    # Windows take from the tokens that fit by the length of a mean request, here of 9 others.
    assert kv == pytest.approx(here.kv_tokens, rel=0 if llm.plain else 0.01)


def test_replicas_are_made_of_facts_in_one_place() -> None:
    """Others cost a pipeline or an island, or read what an engine or a file says of itself."""
    makers = set()
    for path in Path(hetero.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Replica":
                makers.add(path.relative_to(Path(hetero.__file__).parent).as_posix())
    assert makers == {
        "engines.py",
        "costs/replicas.py",
        "planners/rignall/replay.py",
        "simulator/pipeline_run.py",
        "simulator/warm.py",
        "apps/serving/settings.py",
        "apps/cli/profile.py",
    }


FLEET, LLM = cluster("thunderserve-a5000-pair"), catalog.llm("Llama-3-8B")
FEW = workload.load("azure2023_conv").head(300)
SERVED = hetero.replicated(FLEET, LLM, {"a5000-1": 1, "a5000-2": 1})


def test_every_answer_says_what_it_stands_on(told) -> None:
    slo = hetero.Slo(ttft_s=2.0)
    asked = {"model": LLM, "trace": FEW, "slo": slo, "rate": 1.0}
    card = hetero.plan(FLEET, **asked, effort="quick")
    compared = hetero.compare(SERVED, Predictive(), FEW, seeds=1, resample=False, slo=slo)
    view = hetero.explore(SERVED, FEW, 1.0, slo, requests=50)
    sized = hetero.size(**asked, gpu=["A40"], engine="any", seeds=1)
    said = told("simulate", FLEET.name, "--requests", 50, "--router", "hetero")
    others = (said["notes"], sized.table().notes, record(sized)["notes"])
    for notes in (card.notes, [compared.note], view.notes, *others):
        assert any(one.startswith(f"Predictor {DEFAULT}; engine ") for one in notes)
    assert hetero.Question(FLEET, LLM, FEW, 1.0).engine == hetero.EngineSpec()
    assert card.question.engine == hetero.EngineSpec().name


def test_what_nobody_says_is_a_guess_and_not_the_truth() -> None:
    busy, plan = (
        FEW.all_at_once(),
        hetero.Plan("by hand", (), SERVED, Predictive(), "hetero", None),
    )
    runs = [hetero.simulate(SERVED, busy, Predictive(), predictor=one) for one in (None, DEFAULT)]
    runs += [plan.simulate(busy), plan.simulate(busy, predictor=Oracle())]
    ends = [one.requests["finish_s"].tolist() for one in runs]
    assert ends[0] == ends[1] == ends[2] != ends[3]
