"""Server-sent events of a streamed answer, passed on as they are and read on the way."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")
_REASON = re.compile(rb'"finish_reason"\s*:\s*"')


@dataclass(slots=True)
class Usage:
    """Token counts of an engine; 0 where it has told none."""

    input_tokens: int = 0
    output_tokens: int = 0

    def take(self, message: Any) -> bool:
        """Take over the counts of a message, if it has them."""
        found = message.get("usage") if isinstance(message, dict) else None
        if not isinstance(found, dict):
            return False
        self.input_tokens = _count(found.get("prompt_tokens"))
        self.output_tokens = _count(found.get("completion_tokens"))
        return True


@dataclass(slots=True)
class Events:
    r"""Reads a stream piece by piece.

    Parameters
    ----------
    keep_usage
        Whether the client asked for the event that holds nothing but the counts.

    Examples
    --------
    >>> events = Events(keep_usage=False)
    >>> events.feed(b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choi')
    b'data: {"choices":[{"text":"a"}]}\n\n'
    >>> events.pieces, events.finished
    (1, False)
    >>> events.feed(b'ces":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n')
    b''
    >>> events.usage.input_tokens
    3
    """

    keep_usage: bool
    usage: Usage = field(default_factory=Usage)
    pieces: int = 0
    finished: bool = False
    done: bool = False
    error: str = ""
    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """Whole events of what has come so far, to be passed on."""
        data = self._rest + data if self._rest else data
        passed: list[bytes] = []
        start = 0
        for match in _END.finditer(data):
            event = data[start : match.end()]
            start = match.end()
            if self._read(event):
                passed.append(event)
        self._rest = data[start:]
        return b"".join(passed)

    def _read(self, event: bytes) -> bool:
        """Note what an event says; whether it is passed on."""
        if not event.startswith(b"data:"):
            return True
        payload = event[5:].strip()
        if payload == b"[DONE]":
            self.done = True
            return True
        if _REASON.search(payload):
            self.finished = True
        # Reading every event as JSON would cost more than passing it on.
        if self.pieces == 0 or b'"usage"' in payload or b'"error"' in payload:
            return self._parse(payload)
        self.pieces += 1
        return True

    def _parse(self, payload: bytes) -> bool:
        try:
            message = json.loads(payload)
        except ValueError:
            self.error = "the engine sent an event that is no JSON"
            return False
        if not isinstance(message, dict):
            return True
        choices = message.get("choices")
        if "error" in message and not choices:
            self.error = _text(message["error"])
            return False
        counted = self.usage.take(message)
        if not choices:
            return self.keep_usage or not counted
        self.pieces += any(map(_has_text, choices)) or self.pieces > 0
        return True


def _has_text(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls"))
    return bool(choice.get("text"))


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:200] or "the engine reported an error"
