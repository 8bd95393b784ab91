"""Frames of the published latency files and of their derived reductions, catalog names inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hetero import paths

if TYPE_CHECKING:
    import pandas as pd

Source = Literal["splitwise", "helix", "aiconfigurator", "profiles"]
SOURCES: tuple[Source, ...] = ("splitwise", "helix", "aiconfigurator", "profiles")

_DATASETS = {
    "splitwise": "splitwise_perf_model",
    "helix": "helix_layer_latency",
    "aiconfigurator": "aiconfigurator_grid",
    "profiles": "llmservingsim_profile",
}
_GPUS = {
    "a100-80gb": "A100-SXM-80GB",
    "h100-80gb": "H100-SXM",
    "a100": "A100-SXM-40GB",
    "v100": "V100-16GB",
    "l4": "L4",
    "t4": "T4",
    "a100_sxm": "A100-SXM-80GB",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "l40s": "L40S",
    "b200_sxm": "B200-SXM",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}
_LLMS = {
    "llama2-70b": "Llama-2-70B",
    "bloom-176b": "BLOOM-176B",
    "llama1_30b": "LLaMA-1-30B",
    "llama2_70b": "Llama-2-70B",
    "Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "Meta-Llama-3.1-70B": "Llama-3.1-70B",
}


def raw_available(source: Source) -> bool:
    """Whether the published file of a source is here, fetched or in the mirror."""
    from hetero.workload import datasets

    return datasets.available(_DATASETS[source])


def raw_frame(source: Source) -> pd.DataFrame:
    """Rows of a published file, GPU and model under their names in the catalog.

    Layer profiles are many files, which :mod:`pipelines.studies.layer_profiles` reads.

    Raises
    ------
    DownloadError
        If the file is not there; the text says how to fetch it.
    """
    import pandas as pd

    from hetero.workload import datasets

    frame = pd.read_csv(datasets.path(_DATASETS[source]))
    if source == "splitwise":
        # Not measured: every prompt time is 1.3 times the unthrottled one, token times are equal.
        frame = frame[frame["hardware"] != "h100-80gb-pcap"].rename(
            columns={
                "prompt_size": "input_tokens",
                "batch_size": "batch",
                "token_size": "output_tokens",
                "prompt_time": "prefill_ms",
                "token_time": "decode_ms",
            }
        )
        names = frame["hardware"]
    elif source == "helix":
        frame = frame[frame["batch_tokens"] > 0]
        parts = frame["machine"].str.extract(r"^(?P<name>.+?)(?:x(?P<count>\d+))?$")
        names = parts["name"]
        frame = frame.assign(
            tensor_parallel=parts["count"].fillna("1").astype(int),
            phase=frame["phase"].replace("prompt", "prefill"),
        )
    else:
        # Steps that do not fit the GPU's memory are predictions of something that cannot run.
        frame = frame[frame["fits"] == 1].rename(columns={"tp": "tensor_parallel"})
        frame = frame.assign(engine=frame["engine"] + " " + frame["engine_version"])
        names = frame["gpu"]
    return frame.assign(gpu=names.map(_GPUS), llm=frame["model"].map(_LLMS))


def derived_frame(name: str) -> pd.DataFrame:
    """Rows of a file of ``data/measured``."""
    import pandas as pd

    return pd.read_csv(paths.data("measured", f"{name}.csv"))


def replicas(frame: pd.DataFrame) -> Iterator[tuple[str, str, int, str, pd.DataFrame]]:
    """GPU, model, tensor-parallel degree, engine (empty without that column) and their rows."""
    keys = ["gpu", "llm", "tensor_parallel", *(["engine"] if "engine" in frame else [])]
    for key, rows in frame.groupby(keys):
        gpu, llm, degree, *engine = map(str, key)
        yield gpu, llm, int(degree), "".join(engine), rows
