"""Names of the catalogue and of shipped clusters, and those that files may not give."""

from __future__ import annotations

import json

import pytest

from hetero import catalog, naming, paths
from hetero.apps.capacity import prices
from hetero.catalog import huggingface
from hetero.cluster import Cluster
from hetero.errors import CatalogError, DataError

HOSTILE = (
    "b\ntouch PWNED_BY_NAME\n#",
    "../../trav",
    "/etc/profile.d/x",
    "x\n---\napiVersion: v1\nkind: Pwned\n---\n#",
    "$(HF_TOKEN)",
    "`id`",
    "a b ",
    "-rf",
    "a\x00b",
    "a\u202eb",
    "m" * 300,
    "",
)


def test_every_name_that_is_shipped_is_good():
    rows = [*catalog.gpus(), *catalog.llms(), *catalog.links()]
    assert len(rows) > 80
    assert all(naming.good(name) for row in rows for name in (row.name, *row.aliases))
    files = sorted(paths.data("clusters").glob("*.yaml"))
    assert len(files) > 20
    for file in files:
        assert Cluster.load(file).machines


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "v100 t=4/0", "rack 1 (old)", "a"])
def test_names_that_people_give(name):
    assert naming.good(name)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("where", ["cluster", "machine", "region", "gpu", "between"])
def test_a_cluster_file_with_another_name_is_refused_in_one_sentence(name, where, tmp_path):
    tree = {
        "name": "fleet",
        "gpus": {"own": {"mem_gib": 80, "mem_bw_gbs": 2000, "fp16_tflops": 300}},
        "machines": [{"name": "a", "gpu": "own"}, {"name": "b", "gpu": "own", "region": "r"}],
        "network": {
            "within_region": {"link": "WAN-100M"},
            "pairs": [{"between": ["a", "b"], "link": "WAN-100M"}],
        },
    }
    if where == "cluster":
        tree["name"] = name
    elif where == "gpu":
        tree["gpus"] = {name: tree["gpus"]["own"]}
    elif where == "between":
        tree["network"]["pairs"][0]["between"][0] = name
    else:
        tree["machines"][0]["name" if where == "machine" else "region"] = name
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps(tree))
    with pytest.raises(CatalogError, match="letters, digits, spaces") as failed:
        Cluster.load(file)
    assert len(str(failed.value).split("\n")) == 1


def test_a_file_with_an_odd_name_lends_the_cluster_a_plain_one(tmp_path):
    file = tmp_path / "my fleet; rm -rf.yaml"
    file.write_text("machines: [{name: a, gpu: L4}]")
    assert Cluster.load(file).name == "my-fleet-rm-rf"


def test_a_price_list_and_a_config_with_such_names_are_refused(tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text(json.dumps({"name": "x\n#", "machines": [{"gpu": "L4", "usd_per_h": 1}]}))
    with pytest.raises(DataError, match="name: this is not a name"):
        prices.load(file)
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "vocab_size": 128256, "intermediate_size": 14336,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    with pytest.raises(DataError, match="_name_or_path"):
        huggingface.read(config | {"_name_or_path": "x\ncmd\n#"})
    for sizes in ({"num_hidden_layers": 10**9}, {"head_dim": 10**9}):
        with pytest.raises(DataError, match="size"):
            huggingface.read(config | sizes)
