"""No file, however damaged, ends a reader in anything but a result or a sentence that helps.

Every run but one with ``CI`` draws fresh examples, about 900 over all readers, from a seed that it
prints. ``HETERO_FUZZ_SEED=N`` draws those of a run again, ``HETERO_FUZZ=330`` that many per reader
(9,000 and more in all); ``-rP`` lists how many files of each reader were taken.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hypothesis import HealthCheck, Phase, given, seed, settings

from hetero import catalog, paths, timings
from hetero.apps.capacity import prices
from hetero.apps.capacity.curve import LoadCurve
from hetero.apps.cards.card import PlanCard
from hetero.apps.export import Service, routing, write
from hetero.apps.serving import settings as serving_settings
from hetero.apps.serving.dispatcher import Dispatcher, Prepared
from hetero.catalog import huggingface
from hetero.catalog import tables as catalog_tables
from hetero.cluster import file as cluster_file
from hetero.errors import DataError, HeteroError
from hetero.latency import storage
from hetero.latency import tables as latency_tables
from hetero.latency.step import StepModel
from hetero.workload import readers
from hetero.workload.twin import Twin
from pipelines import run, schema, source
from pipelines.studies import ledger, published
from pipelines.sweep import spec
from tests.hetero.fuzzed_plans import CARD, DEPLOYMENT
from tests.hetero.fuzzing import Reader, check, damaged, warm_up

EXAMPLES = int(os.environ.get("HETERO_FUZZ", "32"))
SEED = int(os.environ["HETERO_FUZZ_SEED"])  # conftest.py has drawn one where none was given
FUZZ = settings(
    max_examples=EXAMPLES,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319569,3180,8
2023-11-16 18:17:04.0781234,110,27
"""
OWN = b"""arrival_s,input_tokens,output_tokens,session_id,block_tokens,prefix_ids
0.0,100,10,1,16,1 2
0.5,20,5,a,16,1
2.0,300,0,1,16,1 2 3
"""
LENGTHS = b"input_tokens,output_tokens\n100,10\n20,5\n"
MOONCAKE = b"""{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
{"timestamp": 6000, "input_length": 1, "output_length": 0, "hash_ids": []}
"""
MEASURED = b"""phase,batch,input_tokens,context_tokens,output_tokens,ms
prefill,1,128,,,12.5
decode,4,100,,9,90
decode,8,,512,,11
"""
CLUSTER = {
    "name": "fleet",
    "gpus": {"own": {"mem_gib": 80, "mem_bw_gbs": 2000, "fp16_tflops": 300}},
    "machines": [
        {"name": "big", "gpu": "H100-SXM", "count": 8, "region": "eu", "usd_per_h": 20.5},
        {"name": "small", "gpu": "own", "copies": 3, "region": "us"},
    ],
    "network": {
        "within_region": {"bandwidth_gbit_s": 40, "latency_ms": 0.1},
        "between_regions": {"link": "WAN-100M"},
        "pairs": [{"between": ["eu", "us"], "bandwidth_gbit_s": 1, "latency_ms": 90}],
        "coordinator": {"region": "eu"},
    },
}
SWEEP = {
    "stage": "request_scheduling",
    "profile": "smoke",
    "grid": {"thetas": [0.0, 2.0]},
    "repeat": {"seeds": [0, 1]},
    "fixed": {"requests": 100},
    "measures": {"x": {"table": "theta", "column": "throughput [tokens/s]", "where": {"a": 1}}},
    "limit_s": 6,
}
SOBOL = {
    "stage": "request_scheduling",
    "sobol": {"count": 4, "seed": 0, "ranges": {"thetas": {"low": 0.0, "high": 2.0}}},
    "measures": {"x": {"claim": "xiong-1a"}},
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
LAYERED = CONFIG | {
    "layer_types": ["linear_attention", "full_attention"] * 16,
    "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "model.layers.*.mlp"],
    },
}
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Title\n", "prose"]},
        {
            "cell_type": "code",
            "id": "b",
            "metadata": {"tags": ["parameters"]},
            "source": ["count: int = 1\n", 'output: str = ""'],
            "outputs": [],
            "execution_count": None,
        },
    ],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}
MANIFEST = {
    "notebook": "01_workloads",
    "source": "twin",
    "profile": "smoke",
    "figures": [{"file": "a.svg", "shows": ["xiong/Fig. 4"], "caption": "A."}],
    "tables": [],
    "claims": [{"id": "xiong-1a", "value": 1.5, "figure": "a", "interval": [1.0, 2.0]}],
}
TIMINGS = b"""key,seconds,statistic,repeats,clock,command,machine,date
a,0.5,median,3,cpu,hetero bench a,one,2026-01-01
b,1.5,single,1,wall,hetero bench b,one,2026-01-02
"""


def _parquet() -> bytes:
    stream = io.BytesIO()
    pd.read_csv(io.BytesIO(LENGTHS)).assign(arrival_s=[0.0, 1.0]).to_parquet(stream, index=False)
    return stream.getvalue()


def _first_lines(*parts: str, count: int = 4) -> bytes:
    lines = paths.data(*parts).read_bytes().splitlines(keepends=True)
    return b"".join(lines[:count])


@functools.cache
def _settings() -> Path:
    return paths.data("published", "settings.csv")


def _sweep(path: Path) -> object:
    found = spec.read(path)
    return None if found.search is not None else spec.points(found, path.name)


def _ledger(path: Path) -> object:
    return ledger.read(path, _settings())


def _manifest(path: Path) -> object:
    with tempfile.TemporaryDirectory() as results:
        target = Path(results) / "twin" / "01_workloads" / "manifest.json"
        target.parent.mkdir(parents=True)
        shutil.copy(path, target)
        return published.manifests(Path(results))


def _notebook(path: Path) -> object:
    return source.code(path), run.parameter_names(path)


def _card(path: Path) -> object:
    card = PlanCard.load(path)
    said = str(card), card.to_html()
    service = Service.of_card(card)
    with tempfile.TemporaryDirectory() as folder:
        for target in ("vllm", "kubernetes", "skypilot", "routing"):
            # Files outside would be seen: the folder is made in one that holds nothing else.
            write(service, target, Path(folder) / target)
            assert {one.name for one in Path(folder).iterdir()} <= {
                "vllm", "kubernetes", "skypilot", "routing"
            }  # fmt: skip
    return said


def _deployment(path: Path) -> object:
    if not path.is_file():
        return serving_settings.load(path)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "step.json").write_text(json.dumps(STEP))
        file = Path(shutil.copy(path, Path(folder) / "deployment.yaml"))
        return Dispatcher(Prepared.of(serving_settings.load(file)))


def _routing(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise DataError("no text", path=path, resolve="give text") from None
    return routing.from_json(text, str(path))


def _tree(name: str, ending: str, tree: object, read) -> Reader:  # type: ignore[no-untyped-def]
    return Reader(name, ending, json.dumps(tree, indent=1).encode(), read, tree)


STEP = json.loads(
    storage.to_json(StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7))
)
THETA = paths.root() / "pipelines" / "sweeps" / "theta.yaml"
PARAMS = paths.root() / "params.yaml"

PRICES = {
    "name": "rent",
    "gpus": {"own": {"mem_gib": 80, "mem_bw_gbs": 2000, "fp16_tflops": 300}},
    "machines": [
        {"gpu": "L4", "count": 2, "usd_per_h": 1.4, "limit": 8},
        {"gpu": "own", "usd_per_h": 3.0, "spot_usd_per_h": 1.0, "losses_per_h": 0.1},
    ],
}
TWIN = json.loads(paths.data("twins", "mooncake_synthetic.json").read_text())
SERVICE = Service.of_card(CARD)
TABLE = routing.table(SERVICE, {one.name: "http://m:8000" for one in SERVICE.servings})
CURVE = b"hour,rate_rps\n0,1.5\n1,2.5\n2,2.0\n"

VLLM = {"input_lens": [5, 6], "output_lens": [2, 3], "errors": ["", ""], "duration": 1.0}
VLLM |= {"start_times": [1.5, 2.0], "ttfts": [0.1, 0.2], "itls": [[0.1], [0.2, 0.1]]}
ASKED = {"timestamp": 10**18, "response_timestamps": [10**18 + 5, 10**18 + 9]}
ASKED |= {"response_outputs": [{"response": '"prompt_tokens": 5, "completion_tokens": 2'}]}
GENAI = {"experiments": [{"requests": [ASKED]}]}

READERS = [
    _tree("plan card", ".json", CARD.to_dict(), _card),
    _tree("deployment file", ".yaml", DEPLOYMENT, _deployment),
    _tree("price list", ".yaml", PRICES, prices.load),
    _tree("twin", ".json", TWIN, Twin.load),
    _tree("routing table", ".json", TABLE.model_dump(mode="json"), _routing),
    Reader("load curve", ".csv", CURVE, LoadCurve.load),
    Reader("azure csv", ".csv", AZURE, readers.read),
    Reader("own csv", ".csv", OWN, readers.read),
    Reader("lengths", ".csv", LENGTHS, readers.read),
    Reader("sorted csv", ".csv", OWN, functools.partial(readers.read, sort=True)),
    Reader("csv in ms", ".csv", OWN, functools.partial(readers.read, columns="unit=ms")),
    Reader("csv.gz", ".csv.gz", gzip.compress(AZURE, mtime=0), readers.read),
    Reader("mooncake", ".jsonl", MOONCAKE, readers.read),
    Reader("parquet", ".parquet", _parquet(), readers.read),
    _tree("vllm bench", ".json", VLLM, readers.read),
    _tree("genai-perf", ".json", GENAI, readers.read),
    Reader("measurements", ".csv", MEASURED, latency_tables.read_csv),
    _tree("step model", ".json", STEP, storage.load),
    _tree("cluster file", ".yaml", CLUSTER, cluster_file.load),
    _tree("sweep", ".yaml", SWEEP, _sweep),
    _tree("sobol sweep", ".yaml", SOBOL, _sweep),
    Reader("theta sweep", ".yaml", THETA.read_bytes(), _sweep),
    _tree("config.json", ".json", CONFIG, huggingface.read),
    _tree("layered config.json", ".json", LAYERED, huggingface.read),
    _tree("notebook", ".ipynb", NOTEBOOK, _notebook),
    _tree("manifest", ".json", MANIFEST, _manifest),
    Reader("params.yaml", ".yaml", PARAMS.read_bytes(), schema.load),
    Reader("timings", ".csv", TIMINGS, timings.timings),
    Reader("ledger", ".csv", _first_lines("published", "claims", "xiong.csv"), _ledger),
    Reader(
        "GPUs",
        ".csv",
        _first_lines("specs", "gpus.csv"),
        functools.partial(catalog_tables.read_table, kind="GPU", record=catalog.Gpu),
    ),
    Reader(
        "models",
        ".csv",
        _first_lines("specs", "models.csv"),
        functools.partial(catalog_tables.read_table, kind="model", record=catalog.Llm),
    ),
]


@pytest.mark.parametrize("reader", READERS, ids=lambda one: one.name)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(reader: Reader) -> None:
    counted = {True: 0, False: 0}

    @seed(SEED)
    @FUZZ
    @given(damaged(reader))
    def damage(content: bytes) -> None:
        counted[check(reader, content)] += 1

    warm_up(reader)
    assert check(reader, reader.good)
    try:
        damage()
    except BaseException as error:
        error.add_note(f"Drawn again by HETERO_FUZZ_SEED={SEED} HETERO_FUZZ={EXAMPLES}.")
        raise
    print(f"{reader.name}: {counted[True]} taken, {counted[False]} refused")


LAUGHS = "\n".join(
    ["l0: &l0 [ha, ha]"] + [f"l{k}: &l{k} [{', '.join([f'*l{k - 1}'] * 10)}]" for k in range(1, 12)]
)


@pytest.mark.parametrize(
    ("read", "content", "says"),
    [
        (cluster_file.load, LAUGHS, "aliases"),
        (_sweep, LAUGHS, "aliases"),
        (schema.load, LAUGHS, "aliases"),
        (cluster_file.load, "[" * 50_000 + "]" * 50_000, "nested too deep"),
        (_sweep, "x: " + "{a: " * 30_000 + "}" * 30_000, "nested too deep"),
        (cluster_file.load, "a" * 10_000_000, "characters"),
        (
            cluster_file.load,
            "machines: [{name: a, gpu: L4, copies: 2000000000}]",
            "at most 100,000",
        ),
        (
            cluster_file.load,
            "machines: [{name: a, gpu: L4}, {name: a, gpu: L4}]",
            "2 machines called",
        ),
        (
            _sweep,
            json.dumps(SWEEP | {"grid": {"thetas": [0.5] * 3000, "seeds": [1] * 3000}}),
            "points; 100,000 are allowed",
        ),
        (
            _sweep,
            json.dumps(SWEEP | {"measures": {"x": {"table": "../../secret", "column": "a"}}}),
            "not a path",
        ),
    ],
)
def test_files_made_to_stop_a_reader_are_refused(read, content, says, tmp_path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(content)
    with pytest.raises(HeteroError, match=says):
        read(path)


@pytest.mark.parametrize("reader", READERS, ids=lambda one: one.name)
def test_what_is_no_file_is_refused(reader: Reader, tmp_path: Path) -> None:
    if reader.name == "manifest":
        pytest.skip("a folder of results is searched for manifests; a missing one is no error")
    (tmp_path / "folder.csv").mkdir()
    for name in ("folder.csv", "none.csv"):
        with pytest.raises(HeteroError):
            reader.read(tmp_path / name)


def test_nothing_reads_a_pickle() -> None:
    # A pickle runs the code of whoever wrote it; processes of one sweep exchange their own only.
    root = paths.root()
    files = [*(root / "hetero").rglob("*.py"), *(root / "pipelines").rglob("*.py")]
    assert len(files) > 200
    unsafe = re.compile(
        r"allow_pickle\s*=\s*True|\b(?:pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal)"
        r"\.(?:load|loads|open|Unpickler)\b|read_pickle|torch\.load|yaml\.(?:unsafe_|full_)?load\("
        r"|typ=.unsafe|\beval\(|\bexec\("
    )
    allowed = {"hetero/files.py", "pipelines/repro.py"}  # safe, or ours
    found = [
        f"{path.relative_to(root)}: {match.group()}"
        for path in files
        if "build" not in path.parts and str(path.relative_to(root)) not in allowed
        for match in unsafe.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
