"""Search by Bayesian optimisation with Ax: batches of points, each chosen from what came before."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetero.errors import ParameterError
from hetero.files import writing
from pipelines.sweep import spec, table
from pipelines.sweep.point import Job
from pipelines.sweep.workers import run_all

_EMPTY_ANSWERS = 20  # in a row, before a search is called exhausted


def run(
    found: spec.Sweep,
    jobs_of: Callable[[list[spec.Point]], list[Job]],
    on: str,
    workers: int,
    show: bool | None,
) -> list[Job]:
    """Run a search to its number of trials; settings are kept, so a stopped one goes on."""
    assert found.search is not None  # the caller dispatches on it
    aim = found.search.maximise or found.search.minimise or ""
    if aim not in found.measures:
        raise ParameterError(
            f"The search is after '{aim}', which is none of its measures.",
            resolve=f"use one of {', '.join(found.measures)}.",
        )
    jobs: list[Job] = []
    middle = {name: spec.scaled(one, 0.5) for name, one in found.search.ranges.items()}
    first = jobs_of(spec.repeated(found, middle))
    # Searches over different things have files of their own.
    text = found.model_dump_json(exclude={"measures": True, "limit_s": True})
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    log = Path(first[0].folder) / f"asked-{name}.json"
    asked: list[dict[str, Any]] = json.loads(log.read_text()) if log.is_file() else []
    client = _client(found.search, aim)
    known = 0
    while known < found.search.trials:
        if known == len(asked):
            asked += _more(client, found.search, found.search.trials - known)
            log.parent.mkdir(parents=True, exist_ok=True)
            with writing(log, force=True) as part:
                part.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
        batch = asked[known : known + found.search.batch]
        points = [point for values in batch for point in spec.repeated(found, values)]
        new = jobs_of(points)
        run_all(new, on=on, workers=workers, show=show)
        jobs += new
        for values in batch:
            own = jobs_of(spec.repeated(found, values))
            _tell(client, values, table.collect(found, own)[aim].to_numpy(dtype=float), aim)
        known += len(batch)
    return list({job.key: job for job in jobs}.values())


def _client(search: spec.Search, aim: str) -> Any:
    try:
        import torch
        from ax.api.client import Client
        from ax.api.configs import RangeParameterConfig
    except ModuleNotFoundError as error:
        raise ParameterError(
            "A search needs Ax, which is not installed.",
            resolve="install it with `pip install 'hetero[bayes]'`, or use a grid.",
        ) from error
    # Threads that wait for each other spin, which a busy machine pays for many times over.
    torch.set_num_threads(1)
    client = Client(random_seed=search.seed)
    client.configure_experiment(
        name="sweep",
        parameters=[
            RangeParameterConfig(
                name=name,
                bounds=(one.low, one.high),
                parameter_type="int" if one.whole else "float",
                scaling="log" if one.log else None,
            )
            for name, one in search.ranges.items()
        ],
    )
    client.configure_optimization(objective=aim if search.maximise else f"-{aim}")
    return client


def _more(client: Any, search: spec.Search, left: int) -> list[dict[str, Any]]:
    """The next full batch: Ax may answer a request with fewer trials than asked for."""
    found: list[dict[str, Any]] = []
    wanted, empty = min(search.batch, left), 0
    while len(found) < wanted and empty < _EMPTY_ANSWERS:
        trials = client.get_next_trials(max_trials=wanted - len(found))
        empty = 0 if trials else empty + 1
        for index, values in trials.items():
            found.append(dict(values))
            # Told again with its result as a trial of its own, so that a resumed search and an
            # uninterrupted one tell Ax the same.
            client.mark_trial_abandoned(index)
    if not found:
        raise ParameterError(
            "Ax proposes no further setting.", resolve="widen the ranges, or ask for fewer trials."
        )
    return found


def _tell(client: Any, values: dict[str, Any], results: np.ndarray[Any, Any], aim: str) -> None:
    index = client.attach_trial(parameters=values)
    results = results[np.isfinite(results)]
    if not len(results):
        client.mark_trial_failed(index)
        return
    spread = float(results.std(ddof=1) / math.sqrt(len(results))) if len(results) > 1 else None
    mean = float(results.mean())
    client.complete_trial(index, raw_data={aim: mean if spread is None else (mean, spread)})
