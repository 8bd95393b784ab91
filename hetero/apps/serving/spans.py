"""Spans of requests for OpenTelemetry, sent to a collector as OTLP over HTTP in JSON.

A request has one span, whose parent is its client's and which is the parent of its engine's. Names
of attributes are those of the semantic conventions for generative models; none holds a text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hetero.apps.serving.tickets import Ticket

log = logging.getLogger("hetero.apps.serving")
_MOST: Final = 4096  # spans that wait; what comes beyond is dropped and counted
_SEND_S: Final = 5.0
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/embeddings": "embeddings"}
_SERVER, _FAILED = 2, 2  # kind and status, by the protocol's numbers


def child(parent: str) -> str:
    """The ``traceparent`` of a new span below that of another header, or of a trace of its own.

    Examples
    --------
    >>> client = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    >>> mine = child(client)
    >>> mine[:36] == client[:36], mine[36:52] == client[36:52], mine[52:]
    (True, False, '-01')
    >>> len(child(""))
    55
    """
    trace, flags = (parent[3:35], parent[53:]) if parent else (os.urandom(16).hex(), "01")
    return f"00-{trace}-{os.urandom(8).hex()}-{flags}"


class Spans:
    """Spans on their way to a collector.

    Parameters
    ----------
    url
        The collector, such as ``http://127.0.0.1:4318``.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/v1/traces"
        self._waiting: list[dict[str, Any]] = []
        self._sending: asyncio.Task[None] | None = None
        self.sent = self.dropped = 0

    def add(self, ticket: Ticket, outcome: str, outputs: int, now_s: float) -> None:
        """A request has left the house."""
        mine = ticket.asked.headers.get("traceparent", "")
        if not mine or not int(mine[53:], 16) & 1:
            return  # its client wants no span of it
        if len(self._waiting) >= _MOST:
            self.dropped += 1
            return
        zero_ns = time.time_ns() - round(now_s * 1e9)

        def at(seconds: float) -> str:
            return str(zero_ns + round(seconds * 1e9))

        operation = _OPERATIONS.get(ticket.path, "text_completion")
        told: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": ticket.asked.model,
            "gen_ai.usage.input_tokens": ticket.input_tokens,
            "gen_ai.usage.output_tokens": outputs,
            "http.route": ticket.path,
            "hetero.client": ticket.account.client.name,
            "hetero.engine": ticket.engine.backend.name if ticket.engine else "",
            "hetero.attempts": ticket.attempts,
            "hetero.outcome": outcome,
        }
        first_s = ticket.first_s
        events = [] if first_s is None else [{"name": "first token", "timeUnixNano": at(first_s)}]
        span = {
            "traceId": mine[3:35],
            "spanId": mine[36:52],
            "parentSpanId": ticket.parent[36:52],
            "name": f"{operation} {ticket.asked.model}",
            "kind": _SERVER,
            "startTimeUnixNano": at(ticket.arrival_s),
            "endTimeUnixNano": at(now_s),
            "attributes": [{"key": key, "value": _value(value)} for key, value in told.items()],
            "events": events,
            "status": {"code": _FAILED} if outcome == "failed" else {},
        }
        self._waiting.append(span)

    def send(self) -> None:
        """Send what waits, unless a collector has not yet taken what was sent before."""
        if self._waiting and (self._sending is None or self._sending.done()):
            spans, self._waiting = self._waiting, []
            self._sending = asyncio.create_task(self._send(spans))

    async def close(self) -> None:
        """Send what is left, once."""
        if self._sending is not None:
            await self._sending
        self.send()
        if self._sending is not None:
            await self._sending

    async def _send(self, spans: list[dict[str, Any]]) -> None:
        scope = {"scope": {"name": "hetero"}, "spans": spans}
        resource = {"attributes": [{"key": "service.name", "value": _value("hetero")}]}
        body = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
        try:
            await asyncio.to_thread(self._post, json.dumps(body).encode())
        except (OSError, ValueError) as error:
            self.dropped += len(spans)
            log.error("%d spans did not reach %s: %s", len(spans), self._url, error)
        else:
            self.sent += len(spans)

    def _post(self, body: bytes) -> None:
        kind = {"content-type": "application/json"}
        asked = urllib.request.Request(self._url, body, kind)
        with urllib.request.urlopen(asked, timeout=_SEND_S) as answer:
            answer.read()


def _value(value: str | int) -> dict[str, str]:
    return {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}
