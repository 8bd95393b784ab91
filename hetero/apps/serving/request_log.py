"""What became of each request, as lines of JSON without any of its text."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from hetero.apps.serving.tickets import Ticket
from hetero.errors import ParameterError


class RequestLog:
    """Lines at the end of a file."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ParameterError(
                f"The request log {path} cannot be written ({error.strerror}).",
                resolve="name another file as request_log, or leave it out.",
            ) from None
        self.close = self._file.close

    def write(self, ticket: Ticket, outcome: str, outputs: int, now_s: float) -> None:
        """A request has ended."""
        first_s, headers = ticket.first_s, ticket.asked.headers
        line = {
            "time": round(time.time(), 3),
            "id": headers.get("x-request-id", ""),
            "trace_id": headers.get("traceparent", "")[3:35] or None,
            "path": ticket.path,
            "client": ticket.client,
            "model": ticket.asked.model,
            "engine": ticket.engine.backend.name if ticket.engine else None,
            "outcome": outcome,
            "attempts": ticket.attempts,
            "input_tokens": ticket.input_tokens,
            "output_tokens": outputs,
            "ttft_s": None if first_s is None else round(first_s - ticket.arrival_s, 6),
            "e2e_s": round(now_s - ticket.arrival_s, 6),
        }
        with suppress(OSError):  # a full disk is no reason to answer nobody
            self._file.write(json.dumps(line) + "\n")
