"""What can go wrong with a request, what its client gets, and whose fault it is.

Whose fault a failure is, is decided here and nowhere else. An engine is blamed for what it alone
did: a request that other engines fail alike is to blame itself, and what the dispatcher lacks
(descriptors, memory, time to finish a handshake) or a client holds up is no engine's fault. What
says nothing of any request, such as a port where nobody listens, is left to a health check.
"""

from __future__ import annotations

import errno
import json
import socket
from collections import Counter
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, TypeVar

import aiohttp
from aiohttp import ConnectionTimeoutError, web

_Engine = TypeVar("_Engine")
_OWN = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
_OWN |= {errno.EADDRINUSE, socket.EAI_AGAIN, socket.EAI_MEMORY}
_GONE = {errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH}
_GONE |= {socket.EAI_NONAME}


class Refusal(Exception):
    """A request that is not, or not wholly, answered; ``code`` is a short name for programs."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error in the form that OpenAI clients read."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "")
        said = {"message": self.message, "type": kind or "invalid_request_error"}
        return {"error": said | {"param": None, "code": self.code}}

    def answer(self) -> web.Response:
        """An answer with this error."""
        found = {"content-type": "application/json"}
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        body = json.dumps(self.body()).encode()
        return web.Response(status=self.status, body=body, headers=found)


class Fault(Enum):
    """Whose fault it is that an attempt at an engine brought nothing."""

    #: The engine's, unless others fail the request alike.
    ENGINE = auto()
    #: Nobody listens there, or a health check has said so; no request can bring that about.
    GONE = auto()
    #: The dispatcher's: it has no descriptor left, or was too busy to finish a handshake.
    OWN = auto()
    #: An engine that is merely full, or a client that took too long to read.
    NOBODY = auto()


class Failed(Exception):
    """An attempt at one engine that did not end well; the refusal is for the client, if all do so.

    It is ``stale`` if the engine closed the connection before it said anything, as it does with
    connections that were idle for long: the same engine may be asked once more.
    """

    def __init__(
        self, refusal: Refusal, fault: Fault = Fault.ENGINE, *, stale: bool = False
    ) -> None:
        super().__init__(refusal.message)
        self.refusal, self.fault, self.stale = refusal, fault, stale

    @classmethod
    def by(cls, error: Exception, name: str, *, lost: bool, begun: bool, sent: bool) -> Failed:
        """Judge an error of the connection to an engine.

        Was it given up by health checks, had its answer ``begun``, has the client got part of it?
        """
        unmade = isinstance(error, aiohttp.ClientConnectorError | ConnectionTimeoutError)
        if unmade or getattr(error, "errno", None) in _OWN:
            fault = unreached(error)
            text = f"{name} cannot be reached."
            if fault is Fault.OWN:
                text = f"The dispatcher has no connection to {name} to spare."
            return cls(Refusal(502, "engine_unreachable", text), fault)
        if lost:
            text = f"{name} was lost before it answered."
            return cls(Refusal(502, "engine_lost", text), Fault.GONE)
        if isinstance(error, TimeoutError):
            # An answer that was under way came in time, piece by piece, but was too long or was
            # read too slowly as a whole; an engine that says nothing meets another timer.
            silent = isinstance(error, aiohttp.SocketTimeoutError) or not sent
            fault = Fault.ENGINE if silent else Fault.NOBODY
            return cls(Refusal(504, "engine_timeout", f"{name} took too long to answer."), fault)
        idle = isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError)
        broke = Refusal(502, "engine_broke_off", f"{name} broke off its answer.")
        return cls(broke, stale=idle and not begun)


def unreached(error: Exception) -> Fault:
    """Whose fault it is that no connection came about."""
    number = getattr(error, "errno", None)
    if isinstance(error, ConnectionTimeoutError) or number in _OWN:
        return Fault.OWN  # if it is the engine's, health checks see it too
    return Fault.GONE if number in _GONE else Fault.ENGINE


def guilty(failed: Mapping[_Engine, str], *, answered: bool) -> list[_Engine]:
    """The engines to blame for how they failed a request, once it is answered or given up.

    Examples
    --------
    >>> guilty({"a": "engine_error"}, answered=False)
    ['a']
    >>> guilty({"a": "engine_error", "b": "engine_error"}, answered=True)  # they fail it alike
    []
    """
    ways = Counter(failed.values())
    alone = len(failed) < 2 or answered
    return [one for one, way in failed.items() if alone and ways[way] == 1]
