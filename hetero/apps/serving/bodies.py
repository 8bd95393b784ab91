"""Bodies of requests: read within bounds, checked, and written once for the engines."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.lengths import PromptSize, size
from hetero.apps.serving.settings import DispatcherLimits

FREE_BYTES = 64 << 10  # of each body; what connections hold anyway, and they are bounded
_MOST_PARTS = 50_000  # lists and objects in a body; messages have three or so
_LAST = 2**15 - 1  # priority
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


@dataclass(slots=True)
class Asked:
    """What a client asks for; of requests that are held, the smallest priority leaves first."""

    model: str
    stream: bool
    prompt: PromptSize
    allowed: int | None  # tokens at most
    copies: int
    endless: bool  # whether the answer goes on to what is allowed
    options: Any
    rest: bytes
    priority: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names of it and of its trace

    @classmethod
    def of(cls, body: dict[str, Any]) -> Asked:
        """Read a body; what engines could read in another way, or not at all, is refused.

        Examples
        --------
        >>> asked = Asked.of({"model": "m", "prompt": "hello", "max_tokens": 2, "stream": True})
        >>> asked.forwarded("llama", usage=True).decode()
        '{"model":"llama","stream_options":{"include_usage":true},"prompt":"hello","max_tokens":2,"stream":true}'
        >>> Asked.of({"prompt": "hello", "stream": 1})
        Traceback (most recent call last):
            ...
        hetero.apps.serving.faults.Refusal: 'stream' has to be true, false or null.
        """
        # Engines take 1 or "yes" for true, each in its own way, and answer in another form.
        stream = body.get("stream")
        if not (stream is None or isinstance(stream, bool)):
            raise Refusal(400, "invalid_request", "'stream' has to be true, false or null.")
        get = body.get
        allowed = get("max_completion_tokens") or get("max_tokens")
        copies, priority = get("n"), get("priority")
        if not (priority is None or type(priority) is int):  # engines take "-100" for a number
            raise Refusal(400, "invalid_request", "'priority' has to be a whole number.")
        rest = {k: v for k, v in body.items() if k not in ("model", "stream_options")}
        if priority is not None:
            # A client may stand back behind others, and not push ahead of them.
            priority = rest["priority"] = min(max(priority, 0), _LAST)
        try:
            text = _WRITE(rest).encode()
        except (ValueError, RecursionError):
            raise _no_json() from None
        return cls(
            str(body.get("model")),
            stream is True,
            size(body),
            allowed if type(allowed) is int and allowed >= 1 else None,
            copies if isinstance(copies, int) and 1 <= copies <= 128 else 1,
            body.get("ignore_eos") is True,
            body.get("stream_options"),
            text[1:],
            priority or 0,
        )

    @property
    def counts(self) -> bool:
        """Whether the client asks for the event that holds the counts."""
        return isinstance(self.options, dict) and self.options.get("include_usage") is True

    def forwarded(self, model: str, *, usage: bool) -> bytes:
        """The body for an engine that knows the model by this name, and can be asked for counts."""
        head, options = f'{{"model":{_WRITE(model)},', self.options
        if self.stream and usage:
            options = (options if isinstance(options, dict) else {}) | {"include_usage": True}
        if options is not None:
            head += f'"stream_options":{_WRITE(options)},'
        return head.encode() + self.rest


class BodyShare:
    """The bytes of one body among the large ones in flight, until its request has left."""

    __slots__ = ("_all", "_size")

    def __init__(self, together: Counter[str]) -> None:
        self._all, self._size = together, 0

    def grow(self, size: int, limits: DispatcherLimits) -> None:
        """So many bytes have come; refused if there is no room for them beside the others."""
        if size > FREE_BYTES:
            self.check(size, limits)
            self._all["bytes"] += size - self._size
            self._size = size

    def check(self, size: int, limits: DispatcherLimits) -> None:
        """Refuse a size as :meth:`grow` does, before it has come."""
        if size > limits.max_body_bytes:
            text = f"A request may have {limits.max_body_bytes:,} bytes."
            raise Refusal(413, "too_large", text)
        if size <= FREE_BYTES:
            return
        if self._all["bytes"] - self._size + size > max(limits.bodies_bytes, limits.max_body_bytes):
            text = "The requests that are being answered are too large together."
            raise Refusal(503, "overloaded", text, retry_after_s=1.0)

    def leave(self) -> None:
        """The request has left."""
        self._all["bytes"] -= self._size


def parsed(content: bytes | bytearray) -> dict[str, Any]:
    """The body as an object; refused if it has so many parts that reading it holds up others."""
    try:
        if content.count(b"[") + content.count(b"{") > _MOST_PARTS:
            outside = _TEXT.sub(b"", content)
            if outside.count(b"[") + outside.count(b"{") > _MOST_PARTS:
                text = f"A request may have {_MOST_PARTS:,} lists and objects."
                raise Refusal(400, "invalid_request", text)
        body = _READER.decode(content.decode())
    except (ValueError, RecursionError):
        raise _no_json() from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_request", "The body is no JSON object.")
    return body


def _no_json() -> Refusal:
    return Refusal(400, "invalid_json", "The body is no JSON in UTF-8.")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_READER = json.JSONDecoder(parse_constant=_no_number)
# As it came, but for spaces; what is no Unicode (half a surrogate pair) or no number is an error.
_WRITE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
