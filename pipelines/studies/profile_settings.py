"""Layer profiles asked for single prompts and decode steps, beside the other measured tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero.latency.sources.profiles import MOST_CACHED_TOKENS, profiled_steps
from hetero.latency.tables import Measurements

# Settings that a profile is asked for where it stands beside other measured tables.
_PROMPTS = np.array([128.0, 256.0, 512.0, 1024.0, 2048.0])
_BATCHES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
_FEW = 4  # batches of up to 8 requests
_CONTEXTS = np.array([128.0, 512.0, 1024.0, 2048.0, 4096.0])


def measurements() -> tuple[Measurements, ...]:
    """Single prompts and decode steps of every profiled replica, as the other sources give them.

    Kernels timed one by one, added up; nothing between them (scheduling, sampling) is in it. Of
    RTX A6000 and RTX 3090, whose attention of decode steps was not profiled, only steps with so
    little cached that it hardly counts.
    """
    found = []
    for step in profiled_steps():
        whole = not np.isnan(step.errors["mixed"][0])
        sizes = (_BATCHES, _CONTEXTS) if whole else (_BATCHES[:_FEW], _CONTEXTS[:1])
        batch, length = map(np.ravel, np.meshgrid(*sizes, indexing="ij"))
        held = batch * length <= MOST_CACHED_TOKENS
        batch, length = batch[held], length[held]
        table = Measurements(
            decode=np.repeat([False, True], [len(_PROMPTS), len(batch)]),
            batch=np.concatenate([np.ones(len(_PROMPTS)), batch]),
            length_tokens=np.concatenate([_PROMPTS, length]),
            seconds=np.ones(len(_PROMPTS) + len(batch)),
            gpu=step.gpu,
            llm=step.llm,
            tensor_parallel=step.tensor_parallel,
            engine=step.engine,
            source="profiles",
            provenance=step.model.provenance,
        )
        found.append(replace(table, seconds=step.model.seconds(*table.step_arguments)))
    return tuple(found)
