"""Server-sent events of a streamed answer, passed on as they are and read on the way."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_END = re.compile(rb"\r?\n\r?\n")
_LONGEST_END = 4  # bytes
_MOST = 8 << 20  # bytes of an event; a longer one is an error
_SHORT = 32  # bytes
_REASON = re.compile(rb'"finish_reason"\s*:\s*"')
_TOLD = re.compile(rb'"(?:usage|error)"\s*:(?!\s*null)')  # some engines tell null in every event


@dataclass(slots=True)
class Usage:
    """Token counts of an engine; 0 where it has told none."""

    most: int = 2**31 - 1  # tokens that it can hold: a count above is wrong, and cut to it
    input_tokens: int = 0
    output_tokens: int = 0

    def take(self, message: Any) -> bool:
        """Take over the counts of a message, if it has them."""
        found = message.get("usage") if isinstance(message, dict) else None
        if not isinstance(found, dict):
            return False
        self.input_tokens = self._count(found.get("prompt_tokens"))
        self.output_tokens = self._count(found.get("completion_tokens"))
        return True

    def _count(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            return 0
        return min(max(value, 0), self.most)


@dataclass(slots=True)
class Events:
    r"""Reads a stream piece by piece.

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
    >>> events.feed(b"data: [DONE]"), events.end(), events.done
    (b'', b'data: [DONE]\n\n', True)
    """

    keep_usage: bool  # whether the client asked for the event that holds nothing but the counts
    usage: Usage = field(default_factory=Usage)
    pieces: int = 0
    finished: bool = False
    done: bool = False
    error: str = ""
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> bytes:
        """Whole events of what has come so far, to be passed on."""
        rest = self._rest
        if not rest and data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n"):
            return data if self._read(data) else b""  # as most come: one event of one line
        if rest:
            begin = max(len(rest) - _LONGEST_END + 1, 0)  # what was searched is not searched again
            rest += data
            if _END.search(rest, begin) is None:
                return self._too_long() if len(rest) > _MOST else b""
            data = bytes(rest)
            rest.clear()
        *events, left = data.split(b"\n\n")
        end = b"\n\n"
        if b"\r" in data:  # other ends, which stay with their events
            end, cuts = b"", [0, *(match.end() for match in _END.finditer(data))]
            *events, left = (data[a:b] for a, b in pairwise([*cuts, len(data)]))
        kept = [event for event in events if self._read(event)]
        if left:
            rest += left
            if len(rest) > _MOST:
                return self._too_long()
        elif len(kept) == len(events):
            return data
        return b"".join([event + end for event in kept])

    def end(self) -> bytes:
        """What is left when the engine has ended, as an event if it is a whole one."""
        event = bytes(self._rest.rstrip(b"\r\n"))
        self._rest.clear()
        return event + b"\n\n" if event and self._read(event) else b""

    def _too_long(self) -> bytes:
        self._rest.clear()
        self.error = f"the engine sent an event of more than {_MOST:,} bytes"
        return b""

    def _read(self, event: bytes) -> bool:
        """Note what an event says; whether it is passed on."""
        payload = event
        if not event.startswith(b"data:") or 0 <= event.find(b"\n") < len(event) - 2:
            # Comments, names, several lines of data, or other ends of lines.
            lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
            if not lines:
                return True
            payload = b"data:" + b"\n".join(lines)
        if len(payload) < _SHORT and payload[5:].strip() == b"[DONE]":
            self.done = True
            return True
        if _REASON.search(payload):
            self.finished = True
        # Reading every event as JSON would cost more than passing it on.
        find = payload.find  # half the time of `in`
        told = find(b'"usage"') >= 0 or find(b'"error"') >= 0
        if self.pieces == 0 or (told and _TOLD.search(payload)):
            return self._parse(payload[5:])
        self.pieces += 1
        return True

    def _parse(self, payload: bytes) -> bool:
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            self.error = "the engine sent an event that is no JSON"
            return False
        if not isinstance(message, dict):
            return True
        choices = message.get("choices")
        if "error" in message and not choices:
            error = message["error"]
            said = error.get("message") if isinstance(error, dict) else error
            self.error = str(said)[:200] or "the engine reported an error"
            return False
        counted = self.usage.take(message)
        if not choices:
            return self.keep_usage or not counted
        if isinstance(choices, list):
            self.pieces += any(map(_has_text, choices)) or self.pieces > 0
        return True


def _has_text(choice: Any) -> bool:
    delta = choice.get("delta", choice) if isinstance(choice, dict) else None
    names = ("content", "reasoning_content", "tool_calls", "text")
    return isinstance(delta, dict) and any(delta.get(name) for name in names)
