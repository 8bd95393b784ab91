"""Bodies of requests: read, checked, measured and written for engines; and events of answers."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.settings import DispatcherLimits, Outputs

FREE_BYTES = 64 << 10  # of each body; what connections hold anyway, and they are bounded
_MOST_PARTS = 50_000  # lists and objects in a body; messages have three or so
_LAST = 2**15 - 1  # priority
_FIRST = 256  # output tokens, until an answer has ended
_SAMPLE = 200  # answers, of which the median is predicted
_START = 4.0  # characters per token of English text, until engines have told
_MEMORY = 0.05  # weight of the newest prompt in the average
_END = re.compile(rb"\r?\n\r?\n")
_LONGEST_END = 4  # bytes
_MOST = 8 << 20  # bytes of an event; a longer one is an error
_SHORT = 32  # bytes
_REASON = re.compile(rb'"finish_reason"\s*:\s*"')
_TOLD = re.compile(rb'"(?:usage|error)"\s*:(?!\s*null)')  # some engines tell null in every event
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class PromptSize(NamedTuple):
    """Size of a prompt: tokens given as numbers, and characters of text."""

    numbers: int
    characters: int


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


class LengthEstimates:
    """Estimates prompts from what engines counted before, and predicts outputs.

    Examples
    --------
    >>> lengths = LengthEstimates("recent")
    >>> [lengths.prompt(size({"prompt": prompt})) for prompt in ("a" * 400, [1, 2, 3])]
    [100, 3]
    >>> lengths.output(32)
    32
    """

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._per_token = _START
        self._seen = 0
        self._recent: deque[int] = deque(maxlen=_SAMPLE)
        self._median = _FIRST
        self._sorted: list[int] = []

    def prompt(self, prompt: PromptSize) -> int:
        """Tokens of the prompt: counted where they are given as numbers, else estimated."""
        numbers, characters = prompt
        return max(1, numbers + round(characters / self._per_token))

    def output(self, allowed: int | None, copies: int = 1, *, endless: bool = False) -> int:
        """Predicted output tokens of so many answers, where so many are allowed each."""
        if allowed is None:
            return self._median * copies
        if self._outputs == "allowed" or endless:
            return allowed * copies
        return min(allowed, self._median) * copies

    def learn(self, prompt: PromptSize, input_tokens: int, output_tokens: int) -> None:
        """Take over what an engine counted for a finished request."""
        numbers, characters = prompt
        # The mean of what there is until there is enough to forget.
        weight = max(_MEMORY, 1.0 / (self._seen + 1))
        self._seen += 1
        if characters >= 16 and input_tokens > numbers:
            ratio = characters / (input_tokens - numbers)
            self._per_token += weight * (min(max(ratio, 0.25), 16.0) - self._per_token)
        if output_tokens > 0:
            if len(self._recent) == _SAMPLE:
                del self._sorted[bisect_left(self._sorted, self._recent[0])]
            self._recent.append(output_tokens)
            insort(self._sorted, output_tokens)
            self._median = self._sorted[round(0.5 * (len(self._sorted) - 1))]


def size(body: dict[str, Any]) -> PromptSize:
    """Size of the prompt or the messages of a request."""
    numbers = characters = 0
    stack: list[Any] = [body.get("prompt"), body.get("input")]
    messages = body.get("messages")
    if isinstance(messages, list):
        stack += [one.get("content") for one in messages if isinstance(one, dict)]
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            characters += len(part)
        elif isinstance(part, list):
            if part and isinstance(part[0], int):
                numbers += len(part)
            else:
                stack += part
        elif isinstance(part, dict):
            stack += part.get("text"), part.get("content")
    return PromptSize(numbers, characters)


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


# Answers ----------------------------------------------------------------------------------------


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
    r"""Server-sent events of a streamed answer, passed on as they are and read on the way.

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
