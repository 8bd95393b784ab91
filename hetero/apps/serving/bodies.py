"""Bodies of requests: read within bounds, checked, and written once for the engines."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.lengths import PromptSize, size
from hetero.apps.serving.settings import DispatcherLimits

FREE_BYTES = 64 << 10  # of each body; what connections hold anyway, and they are bounded
_MOST_PARTS = 50_000  # lists and objects in a body; messages have three or so
_LONG = 4096  # characters of a string that is passed on as it came
_QUOTES = 5000  # of a body, that are looked at to find those
_MARK = secrets.token_hex(16)  # no client can guess it
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class Incoming(Protocol):
    """What is read of a request, such as Starlette's."""

    def stream(self) -> AsyncIterator[bytes]:
        """Its body, piece by piece."""


@dataclass(slots=True)
class Asked:
    """What a client asks for.

    Attributes
    ----------
    allowed
        Tokens that it wants at most, or None.
    copies
        Answers that it wants.
    endless
        Whether the answer has to go on to what is allowed.
    headers
        Names of the request and of its trace, which engines are told.
    """

    stream: bool
    prompt: PromptSize
    allowed: int | None
    copies: int
    endless: bool
    options: Any
    rest: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, body: dict[str, Any], long: Sequence[str] = ()) -> Asked:
        r"""Read a body, and the long strings that :func:`parsed` took out of it.

        Raises
        ------
        Refusal
            If engines could read it in another way, or not at all.

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
        allowed = body.get("max_completion_tokens") or body.get("max_tokens")
        counted = isinstance(allowed, int) and not isinstance(allowed, bool) and allowed >= 1
        copies = body.get("n")
        rest = {k: v for k, v in body.items() if k not in ("model", "stream_options")}
        try:
            text = _put_back(_WRITE(rest), long).encode()
        except (ValueError, RecursionError):
            raise _no_json() from None
        return cls(
            stream is True,
            size(body, {f"{_MARK}{k}": len(text) for k, text in enumerate(long)}),
            allowed if counted else None,
            copies if isinstance(copies, int) and 1 <= copies <= 128 else 1,
            body.get("ignore_eos") is True,
            body.get("stream_options"),
            text[1:],
        )

    @property
    def counts(self) -> bool:
        """Whether the client asks for the event that holds the counts."""
        return isinstance(self.options, dict) and self.options.get("include_usage") is True

    def forwarded(self, model: str, *, usage: bool) -> bytes:
        """The body for an engine.

        Parameters
        ----------
        model
            Name under which it knows the model.
        usage
            Whether it can be asked for counts.
        """
        head: dict[str, Any] = {"model": model}
        if self.stream and usage:
            options = self.options if isinstance(self.options, dict) else {}
            head["stream_options"] = options | {"include_usage": True}
        elif self.options is not None:
            head["stream_options"] = self.options
        return _WRITE(head)[:-1].encode() + b"," + self.rest


@dataclass(slots=True)
class Held:
    """Bytes of the large bodies that are in the house together."""

    count: int = 0


class BodyShare:
    """The share of one request in them, from its first byte until it has left."""

    __slots__ = ("_held", "_size")

    def __init__(self, held: Held) -> None:
        self._held, self._size = held, 0

    async def read(
        self, request: Incoming, headers: Iterable[tuple[bytes, bytes]], limits: DispatcherLimits
    ) -> bytearray:
        """Read a body.

        Raises
        ------
        Refusal
            If it is too large, takes too long, or there is no room for it beside the others.
        """
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and len(value) < 20:
                self._check(int(value), limits)
        content = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.stream():
                    content += part
                    if len(content) > FREE_BYTES:
                        self._check(len(content), limits)
                        self._held.count += len(content) - self._size
                        self._size = len(content)
        except TimeoutError:
            raise Refusal(408, "too_slow", "The request took too long to come.") from None
        return content

    def _check(self, size: int, limits: DispatcherLimits) -> None:
        if size > limits.max_body_bytes:
            text = f"A request may have {limits.max_body_bytes:,} bytes."
            raise Refusal(413, "too_large", text)
        if size <= FREE_BYTES:
            return
        if self._held.count - self._size + size > max(limits.bodies_bytes, limits.max_body_bytes):
            text = "The requests that are being answered are too large together."
            raise Refusal(503, "overloaded", text, retry_after_s=1.0)

    def leave(self) -> None:
        """The request has left."""
        self._held.count -= self._size
        self._size = 0


def parsed(content: bytearray) -> tuple[dict[str, Any], list[str]]:
    """The body as an object, and its long strings, written as they came.

    Raises
    ------
    Refusal
        If it is none, or is made of so many parts that reading it would hold up all others.
    """
    if content.count(b"[") + content.count(b"{") > _MOST_PARTS:
        outside = _TEXT.sub(b"", content)
        if outside.count(b"[") + outside.count(b"{") > _MOST_PARTS:
            text = f"A request may have {_MOST_PARTS:,} lists and objects."
            raise Refusal(400, "invalid_request", text)
    try:
        text, long = _apart(content.decode(json.detect_encoding(content)))
        body = _READER.decode(text)
    except (ValueError, RecursionError):
        raise _no_json() from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_request", "The body is no JSON object.")
    return body, long


def _apart(text: str) -> tuple[str, list[str]]:
    """A text with names in place of its long strings, and these; half of a pair is an error."""
    long: list[str] = []
    parts: list[str] = []
    done = at = 0
    for _ in range(_QUOTES if len(text) > _LONG else 0):
        start = text.find('"', at) + 1
        end = text.find('"', start) if start else -1
        while end > 0 and text[end - 1] == "\\":
            before = text[max(end - 64, start) : end]
            if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
                break
            end = text.find('"', end + 1)
        if end < 0:
            break
        at = end + 1
        if end - start > _LONG:
            _READER.decode(text[start - 1 : at]).encode()  # an error if it is not right
            parts += text[done:start], f"{_MARK}{len(long)}"
            long.append(text[start:end])
            done = end
    return "".join((*parts, text[done:])), long


def _put_back(text: str, long: Sequence[str]) -> str:
    first, *others = text.split(_MARK) if long else [text]
    found = [first]
    for other in others:
        number, quote, rest = other.partition('"')
        found += long[int(number)], quote, rest
    return "".join(found)


def _no_json() -> Refusal:
    return Refusal(400, "invalid_json", "The body is no JSON in UTF-8.")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_READER = json.JSONDecoder(parse_constant=_no_number)
# As it came, but for spaces; what is no Unicode (half a surrogate pair) or no number is an error.
_WRITE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
