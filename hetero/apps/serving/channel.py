"""Messages between the process that decides and those that relay.

Those of which every request has some are packed, field by field; the others are lists of JSON,
which take eight times as long to write and to read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

_HEAD = Struct("!IB")  # bytes that follow, and the place of the kind; 0 for JSON
_MOST = 2**62


class Form:
    r"""Fields of a message: ``q`` an integer, ``d`` a float, ``?`` yes or no, ``s`` a text.

    Examples
    --------
    >>> form = Form("sq?")
    >>> form.read(form.write(("a", 10**30, True)), 0)
    ['a', 4611686018427387904, True]
    """

    def __init__(self, fields: str) -> None:
        self._fixed = Struct("!" + fields.replace("s", "I"))
        self._texts = [k for k, one in enumerate(fields) if one == "s"]
        self._counts = [k for k, one in enumerate(fields) if one == "q"]

    def write(self, fields: tuple[Any, ...]) -> bytes:
        """The fields as bytes; what no integer of the form can be is cut to the largest."""
        values, texts = list(fields), []
        for k in self._texts:
            texts.append(values[k].encode())
            values[k] = len(texts[-1])
        for k in self._counts:
            values[k] = min(values[k], _MOST)
        return b"".join((self._fixed.pack(*values), *texts))

    def read(self, data: bytes | bytearray, at: int) -> list[Any]:
        """The fields of a message that begins there."""
        values = list(self._fixed.unpack_from(data, at))
        at += self._fixed.size
        for k in self._texts:
            end = at + values[k]
            values[k] = data[at:end].decode()
            at = end
        return values


#: What is packed; -1 stands for a number that is not told.
_FORMS = {
    "enter": Form("qsssqqqq?q?qsssd"),
    "placed": Form("qs"),
    "piece": Form("qqd"),
    "left": Form("qsqq?qqddssq"),
}
_KINDS = ["", *_FORMS]
_PLACES = {kind: place for place, kind in enumerate(_KINDS)}


class Channel(asyncio.Protocol):
    """One end of a stream of messages, in order both ways.

    What is said in one turn of the event loop goes out together.

    Parameters
    ----------
    takes
        What takes the rest of a message, by kind.
    lost
        Called once when the other end has gone.
    """

    def __init__(self, takes: Mapping[str, Callable[..., None]], lost: Callable[[], None]) -> None:
        self._takes, self._lost = takes, lost
        self._transport: Any = None
        self._rest = bytearray()
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The channel stands."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end has gone."""
        self._lost()

    def data_received(self, data: bytes) -> None:
        """Take the messages that are whole."""
        rest, at = self._rest, 0
        rest += data
        while len(rest) >= at + _HEAD.size:
            length, place = _HEAD.unpack_from(rest, at)
            begin = at + _HEAD.size
            if len(rest) < begin + length:
                break
            at = begin + length
            if place:
                kind = _KINDS[place]
                self._takes[kind](*_FORMS[kind].read(rest, begin))
            else:
                kind, *fields = json.loads(rest[begin:at])
                self._takes[kind](*fields)
        del rest[:at]

    def say(self, kind: str, *fields: Any) -> None:
        """Send a message; where the other end has gone, nobody hears it."""
        if not self._out:
            self._loop.call_soon(self._send)
        place = _PLACES.get(kind, 0)
        text = _FORMS[kind].write(fields) if place else _WRITE((kind, *fields)).encode()
        self._out += _HEAD.pack(len(text), place), text

    def _send(self) -> None:
        out, self._out = b"".join(self._out), []
        if not self._transport.is_closing():
            self._transport.write(out)

    def close(self) -> None:
        """No more messages, after those that were said."""
        self._loop.call_soon(self._transport.close)


_WRITE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
