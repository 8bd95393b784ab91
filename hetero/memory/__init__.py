"""What fits: weights and KV cache of an instance on its GPUs (Xiong et al. eq. 1, 2, 5 and 8).

This is arithmetic on bytes. Where the paper leaves a choice, both readings are here and named:

- ``kv_formula``: ``"model"`` counts what the model caches (grouped-query and latent attention
  included), ``"full"`` the paper's ``2 l h`` values per token, four times as much for Llama-3-8B.
- ``overhead_per``: the engine's static memory counts once per ``"gpu"``
  (Xiong et al., section 5.1) or once per ``"instance"`` (their eq. 1), 14 GiB apart on eight GPUs.

GiB are 2**30 bytes. The capacity of a GPU is the nominal one: what a driver or error correction
holds back belongs into ``overhead_gib``, or comes with the rule of a released engine
(:func:`engine_room`).
"""

from hetero.catalog import KvFormula
from hetero.memory.budget import (
    Budget,
    OverheadPer,
    Room,
    RoomSource,
    StageMemory,
    engine_room,
    max_layers,
    minimum_gpus,
)

__all__ = [
    "Budget",
    "KvFormula",
    "OverheadPer",
    "Room",
    "RoomSource",
    "StageMemory",
    "engine_room",
    "max_layers",
    "minimum_gpus",
]
