"""Messages between the process that decides and those that relay: lines of JSON, one a message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any


class Channel(asyncio.Protocol):
    r"""One end of a stream of messages, in order both ways.

    What is said in one turn of the event loop goes out together. A message is a list that begins
    with its kind; it is never longer than what the two processes make up themselves.

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
        self._rest = b""
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
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            kind, *rest = json.loads(line)
            self._takes[kind](*rest)

    def say(self, *message: Any) -> None:
        """Send a message; where the other end has gone, nobody hears it."""
        if not self._out:
            self._loop.call_soon(self._send)
        self._out.append(_WRITE(message).encode() + b"\n")

    def _send(self) -> None:
        out, self._out = b"".join(self._out), []
        if not self._transport.is_closing():
            self._transport.write(out)

    def close(self) -> None:
        """No more messages, after those that were said."""
        self._loop.call_soon(self._transport.close)


_WRITE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
