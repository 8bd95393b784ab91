"""Layer profiles asked for single prompts and decode steps, beside the other measured tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero.latency.sources.profile_tables import LayerProfile, layer_profiles
from hetero.latency.sources.profiles import MOST_CACHED_TOKENS, profiled_steps
from hetero.latency.tables import Measurements

# Settings that a profile is asked for where it stands beside other measured tables.
_PROMPTS = np.array([128.0, 256.0, 512.0, 1024.0, 2048.0])
_BATCHES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
_FEW = 4  # batches of up to 8 requests
_CONTEXTS = np.array([128.0, 512.0, 1024.0, 2048.0, 4096.0])


def measurements(*, raw: bool = False) -> tuple[Measurements, ...]:
    """Single prompts and decode steps of every profiled replica, as the other sources give them.

    Kernels timed one by one, added up; nothing between them (scheduling, sampling) is in it. Of
    RTX A6000 and RTX 3090, whose attention of decode steps was not profiled, only steps with so
    little cached that it hardly counts.
    """
    found = []
    tables = layer_profiles() if raw else (None,) * len(profiled_steps())
    for step, profile in zip(profiled_steps(), tables, strict=True):
        whole = not np.isnan(step.errors["mixed"][0])
        sizes = (_BATCHES, _CONTEXTS) if whole else (_BATCHES[:_FEW], _CONTEXTS[:1])
        batch, length = map(np.ravel, np.meshgrid(*sizes, indexing="ij"))
        held = batch * length <= MOST_CACHED_TOKENS
        batch, length = batch[held], length[held]
        decode = np.repeat([False, True], [len(_PROMPTS), len(batch)])
        b = np.concatenate([np.ones(len(_PROMPTS)), batch])
        lengths = np.concatenate([_PROMPTS, length])
        table = Measurements(
            decode=decode,
            batch=b,
            length_tokens=lengths,
            seconds=np.ones(len(b)),
            gpu=step.gpu,
            llm=step.llm,
            tensor_parallel=step.tensor_parallel,
            engine=step.engine,
            source="profiles",
            provenance=step.model.provenance,
        )
        if profile is None:
            seconds = step.model.seconds(*table.step_arguments)
        else:
            rows = zip(decode.tolist(), b.tolist(), lengths.tolist(), strict=True)
            seconds = np.array([_profiled(profile, *row) for row in rows])
        found.append(replace(table, seconds=seconds))
    return tuple(found)


def _profiled(profile: LayerProfile, decode: bool, batch: float, length: float) -> float:
    """Time [s] of a prompt or a decode step in the table, linear between its lengths."""
    if decode:
        rows = (profile.chunk_tokens == 0) & (profile.decoding == batch)
        x = profile.context_tokens[rows]
    else:
        rows = (profile.decoding == 0) & (profile.start_tokens == 0)
        x = profile.chunk_tokens[rows]
    order = np.argsort(x)
    return float(np.interp(length, x[order], profile.seconds[rows][order]))
