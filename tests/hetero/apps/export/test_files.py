from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from hetero.apps.export import TARGETS, files, kubernetes, routing, write
from hetero.apps.serving import settings
from hetero.errors import DataError, ExportError, ParameterError
from hetero.routers import HeteroServe, PairShares, RangeShares, Workload
from tests.hetero.apps.export.export_plans import pipeline, split, whole


@pytest.mark.parametrize("router", [None, Workload(theta=2.5), HeteroServe()])
def test_hetero_serve_accepts_its_deployment_file(router, tmp_path):
    service = whole(router=router)
    write(service, "serve", tmp_path / "out")
    found = settings.load(tmp_path / "out" / "deployment.yaml")
    assert found.chosen().name == service.router.name
    assert found.model == service.llm.name
    replicas = found.deployment().replicas
    for ours, theirs in zip(replicas, service.deployment.replicas, strict=True):
        assert (ours.name, ours.kv_tokens) == (theirs.name, theirs.kv_tokens)
        assert float(ours.step.seconds(500)) == float(theirs.step.seconds(500))
    assert [one.url for one in found.backends] == list(files.addresses(service).values())
    write(service, "serve", tmp_path / "pods", hosts="kubernetes")
    found = settings.load(tmp_path / "pods" / "deployment.yaml")
    assert [one.url for one in found.backends] == list(kubernetes.addresses(service).values())


def test_the_routing_table_fits_its_schema_and_comes_back(tmp_path):
    for service in (whole(), split(), pipeline(copies=2)):
        [path] = write(service, "routing", tmp_path / service.name)
        text = path.read_text()
        jsonschema.validate(json.loads(text), routing.schema())
        found = routing.from_json(text)
        assert routing.to_json(found) == text
        assert [one.name for one in found.engines] == [one.name for one in service.servings]
    assert found.engines[0].kv_tokens is None
    with pytest.raises(DataError, match="format"):
        routing.from_json(text.replace("table 1", "table 2"))


def test_pairs_and_their_shares():
    service = split()
    found = routing.table(service, files.addresses(service))
    assert [(one.prefill, one.decode, one.share) for one in found.pairs] == [
        ("p", "a", 0.75),
        ("p", "b", 0.25),
    ]


def test_ranges_of_lengths_and_their_shares():
    weights = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 2.0]])
    service = whole(router=RangeShares([512.0, 4096.0], weights, weights))
    found = routing.table(service, files.addresses(service))
    assert [one.below_tokens for one in found.ranges] == [512.0, None]
    names = [one.name for one in service.servings]
    assert found.ranges[0].prefill == {names[0]: 1.0}
    assert found.ranges[1].decode == {names[1]: 0.25, names[2]: 0.25, names[3]: 0.5}
    assert found.rule.name is None


def test_what_the_dispatcher_cannot_serve_is_said(tmp_path):
    with pytest.raises(ParameterError, match="serves only one phase"):
        write(split(), "serve", tmp_path / "a")
    with pytest.raises(ExportError, match="no step times"):
        write(pipeline(), "serve", tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_nothing_is_replaced_and_nothing_half_written(tmp_path):
    service = whole()
    folder = tmp_path / "out"
    [path] = write(service, "routing", folder)
    path.write_text("mine")
    with pytest.raises(ParameterError, match="exists already"):
        write(service, "routing", folder)
    assert path.read_text() == "mine"
    with pytest.raises(ParameterError, match="only what an export wrote"):
        write(service, "routing", folder, force=True)
    assert path.read_text() == "mine"
    path.unlink()
    write(service, "routing", folder)
    before = path.read_text()
    write(replace(service, routing="other"), "routing", folder, force=True)
    assert path.read_text() != before
    with pytest.raises(ParameterError, match="does not exist"):
        write(service, "routing", tmp_path / "no" / "out")
    with pytest.raises(ParameterError, match="No tool is called"):
        write(service, "helm", folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match="exists already"):
        write(service, "vllm", tmp_path / "file")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "out"]


def test_the_same_plan_gives_the_same_bytes(tmp_path):
    for target in TARGETS:
        first = write(whole(), target, tmp_path / f"{target}-1")
        second = write(whole(), target, tmp_path / f"{target}-2")
        assert [one.read_bytes() for one in first] == [one.read_bytes() for one in second]


def test_a_rule_that_the_dispatcher_lacks_is_told_and_another_may_be_chosen(tmp_path):
    shares = PairShares({("v100 t=4", "v100 t=4"): 1.0})
    service = whole(router=shares)
    with pytest.raises(ExportError, match=r"no router .pair shares.*--router"):
        write(service, "serve", tmp_path / "out")
    write(replace(service, router=Workload()), "serve", tmp_path / "out")
    assert settings.load(tmp_path / "out" / "deployment.yaml").chosen().name == "workload"
