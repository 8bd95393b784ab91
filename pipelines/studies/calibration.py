r"""How near default step times come to servers that nobody tuned to, and what is kept of it.

``data/measured/servers.csv`` has a row per run and test with its signed errors
:math:`100 (simulated / measured - 1)` [%], and ``server_repeats.csv`` the spread of repeats of one
setting, below which no simulation comes. The published runs (dataset ``serving_runs``) make both.

Tests are those of :func:`pipelines.studies.server_fit.left_out` (``none``, ``in sample``, ``gpu``,
``llm``), ``generation`` (overheads of the other generation of vLLM alone) and ``default`` (what
every command takes, on the runs of every engine that can be simulated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

import pandas as pd

from hetero.catalog import serving_engine
from hetero.catalog.engines import EngineOverheads
from hetero.errors import require
from hetero.latency.frames import derived_frame
from hetero.workload import datasets
from pipelines.studies import server_fit, servers
from pipelines.studies.server_fit import GENERATIONS, LABELS, Fit

KEYS: Final = ("source", "server", "gpu", "llm", "degree", "load")
TESTS: Final = ("none", "in sample", "gpu", "llm", "generation", "default")
LEFT_OUT: Final = ("gpu", "llm")
"""The tests that count: whole GPUs and whole models left out of the fit."""

_PERCENT = "_percent"
_REPEATS = 3
_NM_VLLM = {"TPOT": "median_tpot_ms", "E2E": "median_request_latency", "TTFT": "median_ttft_ms"}
_INFERENCEMAX = {
    "TPOT": "median_tpot",
    "E2E": "median_e2el",
    "TTFT": "median_ttft",
    "throughput": "output_tput_per_gpu",
}
_SETTING: Final = (
    *("hw", "image", "model", "framework", "precision", "spec_decoding", "disagg", "isl", "osl"),
    *("conc", "tp", "ep", "dp_attention", "num_prefill_gpu", "num_decode_gpu", "prefill_tp"),
    *("prefill_num_workers", "decode_tp", "decode_num_workers"),
)


def read(name: str = "servers") -> pd.DataFrame:
    """A table of ``data/measured``, its percentages under the names of the quantities.

    Examples
    --------
    >>> set(read()["test"]) <= set(TESTS)
    True
    """
    return derived_frame(name).rename(columns=lambda column: str(column).removesuffix(_PERCENT))


def overheads_frame() -> pd.DataFrame:
    """What each generation of vLLM takes beside its kernels [ms], and from where."""
    rows = serving_engine("vllm").overheads
    parts = [part.name for part in fields(EngineOverheads) if part.name.endswith("_s")]
    frame = pd.DataFrame(
        [[row.name, *(1e3 * getattr(row, part) for part in parts), row.source] for row in rows],
        columns=["engine", *(f"{part.removesuffix('_s')} [ms]" for part in parts), "source"],
    )
    return frame.loc[:, (frame != 0.0).any()]


def generation_frame(name: str) -> pd.DataFrame:
    """Errors of the runs of a generation of vLLM in every test but ``default``.

    Raises
    ------
    DownloadError
        If the published runs are not here.
    """
    parts = [server_fit.left_out(name)[1]]
    fit = Fit.of(GENERATIONS[name])
    parts += [
        fit.errors(fit.runs, found).assign(test="generation")
        for found in serving_engine("vllm").overheads
        if found.releases != GENERATIONS[name].releases
    ]
    return _kept(pd.concat(parts, ignore_index=True))


def default_frame() -> pd.DataFrame:
    """Errors of the runs of every engine with what every command takes."""
    parts = [servers.errors_frame(servers.runs(source)) for source in servers.SOURCES]
    return _kept(pd.concat(parts, ignore_index=True).assign(test="default"))


def errors_frame() -> pd.DataFrame:
    """The table ``servers``: errors of every test [%].

    Raises
    ------
    DownloadError
        If the published runs are not here.
    """
    frame = pd.concat([*map(generation_frame, GENERATIONS), default_frame()], ignore_index=True)
    return frame.rename(columns={label: f"{label}{_PERCENT}" for label in LABELS})


def chips_frame() -> pd.DataFrame:
    """The table ``server_chips``: throughput per GPU of MLPerf's chips, each left out in turn.

    Raises
    ------
    DownloadError
        If the published runs are not here.
    """
    frame, _ = servers.ranked()
    return frame.round(2)


def _kept(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the runs that can be simulated, rounded as they are kept."""
    frame = frame[frame["left_out"] == ""].reset_index(drop=True)
    return frame[["test", *KEYS, "kind", *LABELS]].round(dict.fromkeys(LABELS, 2))


def differences_frame(made: pd.DataFrame, kept: pd.DataFrame) -> pd.DataFrame:
    """Largest difference of errors made anew from those that are kept, by test [percentage points].

    Examples
    --------
    >>> some = read().head(3)
    >>> differences_frame(some, read())["TPOT"].tolist()
    [0.0]
    """
    both = pair(made, kept, ("test", *KEYS))
    require(
        len(both) == len(made),
        f"{len(made) - len(both)} of {len(made)} errors are not kept in data/measured/servers.csv.",
        resolve="make it anew: `hetero tables measured/servers --output data --force`.",
    )
    apart = {label: (both[label] - both[f"{label} there"]).abs() for label in LABELS}
    found = both[["test"]].assign(**apart).groupby("test", sort=False)[list(LABELS)].max()
    return found.fillna(0.0).reset_index()


def pair(here: pd.DataFrame, there: pd.DataFrame, keys: tuple[str, ...] = KEYS) -> pd.DataFrame:
    """Rows of two frames that are of one run, columns of the second with ``there`` behind them.

    Models of one shape have one name: runs that are named alike are paired in their order.
    """
    by = [*keys, "among equals"]
    first, second = (
        frame.assign(**{"among equals": frame.groupby(list(keys)).cumcount()})
        for frame in (here, there)
    )
    return first.merge(second, on=by, suffixes=("", " there"), validate="one_to_one")


def summarise(frame: pd.DataFrame, by: tuple[str, ...] = ("test", "source", "gpu")) -> pd.DataFrame:
    """Medians of sizes and of errors [%] by group, and over all sources of a test."""
    every = servers.medians_frame(frame, ("test",)).assign(**dict.fromkeys(by[1:], "all"))
    return pd.concat([servers.medians_frame(frame, by), every], ignore_index=True)[
        [*by, "runs", *(f"{label}{end}" for label in LABELS for end in ("", " bias"))]
    ]


def verdicts_frame(frame: pd.DataFrame, bars: Mapping[str, float]) -> pd.DataFrame:
    """Whether the median sizes of left-out errors are within bars [%], by test and quantity.

    Parameters
    ----------
    bars
        By quantity, of :data:`LABELS`.
    """
    rows = [
        (f"{test} left out", label, len(sizes), sizes.median(), bar, bool(sizes.median() <= bar))
        for test in LEFT_OUT
        for label, bar in bars.items()
        for sizes in [frame.loc[frame["test"] == test, label].abs().dropna()]
    ]
    columns = ["test", "quantity", "runs", "median error [%]", "bar [%]", "holds"]
    return pd.DataFrame(rows, columns=columns)


def published_frame() -> pd.DataFrame:
    """Every published run beside its simulation by the default command, by GPU, model and engine.

    Returns
    -------
    Runs; median size of the error of ``TPOT``, ``throughput`` and ``TTFT`` [%]; of the first two
    with their GPU left out (``without GPU``), where that was done; what was fitted to any of them
    (``fitted``); aiconfigurator's error of TPOT [%] on the same GPU, model and engine; and the
    ``floor`` [%], by which repeats of one setting, or submitters of one benchmark, differ there.

    Examples
    --------
    >>> found = published_frame()
    >>> int(found["runs"].sum()) > 1000, bool((found["floor"].dropna() > 0).all())
    (True, True)
    """
    keys, labels = ["gpu", "llm", "engine"], ["TPOT", "throughput", "TTFT"]
    parts = [_named(read(name)) for name in ("servers", "expert_servers")]
    frame = pd.concat(parts, ignore_index=True)
    frame["llm"] += four_bit(frame)
    size = frame.assign(**{label: frame[label].abs() for label in labels})
    every = size[size["test"] == "default"].groupby(keys)
    found = every[labels].median().assign(runs=every.size())
    apart = size[size["test"] == "gpu"].groupby(keys)[labels[:2]].median()
    found = found.join(apart.rename(columns=lambda label: f"{label} without GPU"))
    sampled = parts[0].loc[parts[0]["test"] == "in sample", keys]
    overheads = set(sampled.itertuples(index=False, name=None))
    shares = derived_frame("experts")
    by = {
        "experts": set(shares.loc[shares["source"].str.startswith("fitted"), "gpu"]),
        "compute": set(derived_frame("offline_compute")["gpu"]),
    }
    mixtures = set(parts[1]["llm"])

    def fitted(key: tuple[str, str, str]) -> str:
        own = "experts" if key[1] in mixtures else "compute"
        names = ["overheads"] * (key in overheads) + [own] * (key[0] in by[own])
        return " ".join(names) or "nothing"

    found["fitted"] = found.index.map(fitted)
    other = _named(read("aiconfigurator_servers"))
    other = other[other["estimate"] == "IFB"].assign(aiconfigurator=other["TPOT"].abs())
    found = found.join(other.groupby(keys)["aiconfigurator"].median())
    return found.join(_floors().rename("floor"), on=["gpu", "engine"]).reset_index()


def four_bit(frame: pd.DataFrame) -> pd.Series[str]:
    """What the name of a GPU or model ends in, by run."""
    packed = frame["source"].str.endswith("4-bit")
    return packed.map({True: ", 4-bit weights", False: ""})


_CHIPS: Final = {"b200": "B200-SXM", "h200": "H200-SXM", "h100": "H100-SXM"}


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """The same with the engine of every run, without its release."""
    name = frame["server"].str.lower().str.partition(" ")[0]
    known = {"nm-vllm": "vllm", "tensorrt-llm": "trtllm", "trt": "trtllm"}
    return frame.assign(engine=name.replace(known))


def _floors() -> pd.Series[float]:
    """Spread of repeats [%] of TPOT, or half of that between submitters of token rates."""
    runs = _named(read("server_repeats"))
    gpus = runs["gpu"].str.partition("-")[0].replace(_CHIPS)
    found = runs.assign(gpu=gpus).groupby(["gpu", "engine"])["TPOT"].median()
    chips = read("server_chips").assign(engine="mlperf")
    half = 50.0 * (chips["high"] - chips["low"]) / chips["tokens_per_s"]
    several = half.where(chips["runs"] > 1).groupby([chips["gpu"], chips["engine"]]).median()
    both: pd.Series[float] = pd.concat([found, several]).dropna()
    return both


def repeats_frame() -> pd.DataFrame:
    """The table ``server_repeats``: coefficient of variation over repeats of one setting [%].

    A10G nights of the last version, and settings of InferenceMAX that ran at least three times.

    Raises
    ------
    DownloadError
        If the published runs are not here.
    """
    nights = pd.read_csv(datasets.path(servers.DATASET, "nm_vllm_a10g.csv"))
    last = nights["nm_vllm"].max()
    nights = nights[nights["nm_vllm"] == last].assign(
        server=f"nm-vllm {last}",
        gpu="A10G",
        llm=nights["model"].str.rpartition("/")[2],
        degree=1,
        load=nights["rate_rps"].map("{:g} req/s".format),
    )
    other = pd.read_csv(datasets.path(servers.DATASET, "inferencemax_even.csv"))
    other = other.assign(
        server=other["framework"],
        gpu=other["hw"],
        llm=other["model"].str.rpartition("/")[2],
        degree=other["tp"].fillna(other["decode_tp"]).astype(int),
        load=other["conc"].map("{:d} clients".format)
        + other["isl"].map(", {:d}".format)
        + other["osl"].map(" + {:d}".format),
    )
    return pd.concat(
        [
            _spread("nm_vllm", nights, ["sparsity"], _NM_VLLM),
            _spread("inferencemax", other, list(_SETTING), _INFERENCEMAX),
        ],
        ignore_index=True,
    )


def _spread(
    source: str, frame: pd.DataFrame, more: list[str], columns: Mapping[str, str]
) -> pd.DataFrame:
    groups = frame.groupby([*KEYS[1:], *more], dropna=False, sort=False)
    found = groups.size().rename("repeats").reset_index()[[*KEYS[1:], "repeats"]]
    found.insert(0, "source", source)
    for label in LABELS:
        if label in columns:
            of = groups[columns[label]]
            found[f"{label}{_PERCENT}"] = (100.0 * of.std() / of.mean()).round(2).to_numpy()
    return found[found["repeats"] >= _REPEATS]
