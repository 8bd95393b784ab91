r"""What aiconfigurator says of the runs of servers that its tables reach, beside our own errors.

It is asked as its command ``aiconfigurator cli estimate`` would be, for vLLM and a model of that
shape. Batches that are timed as a whole are its static estimate. Runs at a rate have as many
requests in flight as Little's law asks for, :math:`N = rate \cdot E2E(N)`, of its estimate for N
(whole N, linear in between), once with its model of continuous batching (``IFB``, a context budget
of one prompt, its default) and once static with prefill alone (``static``); prompts that vLLM found
in its prefix cache are told to it. E2E is TTFT + TPOT x (output - 1).

It lives in an environment of its own (``pip install aiconfigurator==0.12.0``), whose Python
:data:`PYTHON` names; the table of ``data/measured`` is enough for everything else.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pandas as pd

from hetero import paths
from hetero.errors import ParameterError
from pipelines.studies import operators, servers
from pipelines.studies.calibration import KEYS, LEFT_OUT, pair
from pipelines.studies.servers import ServerRun

PYTHON: Final = "HETERO_AICONFIGURATOR"
"""Environment variable: a Python that has aiconfigurator."""

SOURCES: Final = ("blis", "argonne", "dstack batches")

# Of the A100 its tables have the card of 80 GB alone, which reads its memory faster by a third.
_SYSTEMS: Final = operators.SYSTEMS | {"A100-SXM-40GB": operators.SYSTEMS["A100-SXM-80GB"]}
_LABELS: Final = {"tpot_s": "TPOT", "e2e_s": "E2E", "ttft_s": "TTFT"}


def python() -> Path:
    """The Python that has aiconfigurator."""
    default = paths.root() / "pipelines" / "build" / "aiconfigurator" / "bin" / "python"
    path = Path(os.environ.get(PYTHON, default))
    if not path.is_file():
        raise ParameterError(
            "aiconfigurator has no environment here.",
            resolve=f"make one with `pip install aiconfigurator==0.12.0` and set {PYTHON} to its "
            "Python.",
        )
    return path


def asked() -> tuple[ServerRun, ...]:
    """Runs of dense models on vLLM whose GPU it has, or of the same chip with more memory."""
    found = (run for source in SOURCES for run in servers.runs(source))
    return tuple(run for run in found if run.gpu in _SYSTEMS)


def estimates_frame() -> pd.DataFrame:
    """Its estimate of every run it can be asked about.

    Returns
    -------
    One row per run and estimate: the run, ``system`` and ``version`` of its tables, ``estimate``,
    requests in flight, TTFT, TPOT and E2E [ms], and their errors where measured [%].

    Raises
    ------
    DownloadError
        If the published runs are not here.
    """
    runs = asked()
    questions = [question(run) for run in runs]
    # The worker is a function of this file that knows nothing of this project.
    code = f"from __future__ import annotations\n{inspect.getsource(_answers)}\n_answers()"
    answers = subprocess.run(
        [python(), "-c", code], input=json.dumps(questions), capture_output=True, text=True
    )
    if answers.returncode:
        raise ParameterError(
            f"aiconfigurator failed: {answers.stderr.strip().splitlines()[-1]}",
            resolve="use the version that the module names.",
        )
    rows = []
    for run, told in zip(runs, json.loads(answers.stdout), strict=True):
        for one in told:
            ttft, tpot, e2e = one["ms"]
            own = {"ttft_s": ttft / 1e3, "tpot_s": tpot / 1e3, "e2e_s": e2e / 1e3}
            rows.append(
                dict(zip(KEYS, _identity(run), strict=True))
                | {name: one[name] for name in ("system", "version", "estimate", "in_flight")}
                | {"ttft_ms": ttft, "tpot_ms": tpot, "e2e_ms": e2e}
                | {
                    f"{_LABELS[q]}_percent": 100.0 * (value / run.measured[q] - 1.0)
                    for q, value in own.items()
                    if q in run.measured
                }
            )
    frame = pd.DataFrame(rows)
    return frame.round(dict.fromkeys(frame.select_dtypes("number"), 3))


def question(run: ServerRun) -> dict[str, Any]:
    """What its worker is told of a run; a rate where requests do not come all at once."""
    trace, count = run.trace, len(run.trace)
    span = float(trace.arrival_s[-1] - trace.arrival_s[0])
    blocks = trace.prefix_offsets
    return {
        "config": operators.config(run.llm),
        "system": _SYSTEMS[run.gpu],
        "degree": run.tensor_parallel,
        "gemm": "fp8" if run.precision == "fp8" else "bfloat16",
        "input": round(float(trace.input_tokens.mean())),
        "output": round(float(trace.output_tokens.mean())),
        "prefix": 0 if blocks is None else int(trace.block_tokens * blocks[-1] / count),
        "batch": 0 if span else count,
        "rate": (count - 1) / span if span else 0.0,
    }


def joined_frame(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Its estimates with our errors of one test on the same run, ``there`` behind ours."""
    kinds = theirs.groupby("estimate", sort=False)
    return pd.concat([pair(rows, ours) for _, rows in kinds], ignore_index=True)


def comparison_frame(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Median sizes of our errors and of its own on the same runs [%].

    Parameters
    ----------
    ours, theirs
        The tables ``servers`` and ``aiconfigurator_servers``, as ``calibration.read`` has them.

    Returns
    -------
    One row per test of ours, kind of estimate, GPU and quantity: ``runs``, ``ours``, ``theirs``,
    ``nearer`` (share of the runs where ours is nearer [%]) and ``holds`` (in the median).
    """
    rows = []
    for test in (*LEFT_OUT, "default"):
        both = joined_frame(ours[ours["test"] == test], theirs)
        for (estimate, gpu), part in both.groupby(["estimate", "gpu"], sort=False):
            for label in _LABELS.values():
                own = part[f"{label} there"].abs()
                other = part[label].abs()
                known = own.notna() & other.notna()
                if known.any():
                    mine, their = own[known].median(), other[known].median()
                    share = 100.0 * float((own < other)[known].mean())
                    row = (test, estimate, gpu, label, int(known.sum()), mine, their, share)
                    rows.append((*row, bool(mine < their)))
    columns = ["test", "estimate", "gpu", "quantity", "runs", "ours", "theirs", "nearer", "holds"]
    return pd.DataFrame(rows, columns=columns)


def _identity(run: ServerRun) -> tuple[object, ...]:
    return run.source, run.server, run.gpu, run.llm.name, run.tensor_parallel, run.load


def _answers() -> None:
    """Answer the questions of standard input; runs in the environment of aiconfigurator."""
    import importlib
    import json
    import logging
    import sys
    import tempfile
    from pathlib import Path

    logging.disable(logging.WARNING)
    estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate
    newest: dict[str, str] = {}  # its search for the newest tables takes seconds

    def ask(question: dict[str, Any], mode: str, batch: int) -> tuple[float, float, str]:
        """TTFT and TPOT of an estimate [ms], and the version of its tables."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(question["config"])
            found = estimate(
                folder,
                question["system"],
                mode=mode,
                backend_name="vllm",
                backend_version=newest.get(question["system"]),
                isl=question["input"],
                osl=question["output"],
                prefix=question["prefix"],
                batch_size=batch,
                tp_size=question["degree"],
                gemm_quant_mode=question["gemm"],
                kvcache_quant_mode="bfloat16",
                fmha_quant_mode="bfloat16",
            )
        newest[question["system"]] = found.backend_version
        return found.ttft, found.tpot, found.backend_version

    def at_a_rate(question: dict[str, Any], kind: str) -> dict[str, Any]:
        """Estimate for the number of requests in flight that it takes to keep up with a rate."""
        known: dict[int, tuple[float, float, float, str]] = {}

        def of(batch: int) -> tuple[float, float, float, str]:
            if batch not in known:
                ttft, tpot, version = ask(question, "agg" if kind == "IFB" else "static", batch)
                if kind == "static":  # the prompt of one request, not of all at once
                    ttft = ask(question, "static_ctx", 1)[0]
                known[batch] = (ttft, tpot, ttft + tpot * (question["output"] - 1), version)
            return known[batch]

        low, high = 1, 256
        while high - low > 1:
            middle = (low + high) // 2
            if middle <= question["rate"] * of(middle)[2] / 1e3:
                low = middle
            else:
                high = middle
        (ttft, tpot, e2e, version), above = of(low), of(low + 1)
        # N = rate * (e2e + (N - low) * (more - e2e)), in requests and seconds.
        more = question["rate"] * (above[2] - e2e) / 1e3
        share = (question["rate"] * e2e / 1e3 - low) / (1.0 - more)
        share = min(max(share, 0.0), 1.0)
        mixed = [a + share * (b - a) for a, b in zip((ttft, tpot, e2e), above[:3], strict=True)]
        return {"in_flight": low + share, "ms": mixed, "version": version}

    told = []
    for question in json.load(sys.stdin):
        if question["rate"]:
            rows = [at_a_rate(question, kind) | {"estimate": kind} for kind in ("IFB", "static")]
        else:
            ttft, tpot, version = ask(question, "static", question["batch"])
            ms = [ttft, tpot, ttft + tpot * (question["output"] - 1)]
            one = {"in_flight": question["batch"], "ms": ms, "version": version}
            rows = [one | {"estimate": "static"}]
        told.append([row | {"system": question["system"]} for row in rows])
    json.dump(told, sys.stdout)
