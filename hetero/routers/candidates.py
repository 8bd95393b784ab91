"""Which replicas may take a request, and the decode replica beside a prefill replica."""

from __future__ import annotations

from hetero.fleet.candidates import decode_replica, look_ahead, may_take

__all__ = ["decode_replica", "look_ahead", "may_take"]
