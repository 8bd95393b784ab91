"""What comes in: requests for engines, pages, and what is refused at once."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping

from hetero.apps.serving.bodies import BodyShare
from hetero.apps.serving.connections import Exchange
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.relay import RESPONSES, Relay

#: Paths that engines answer, and what a request has to have one of.
ANSWERED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    RESPONSES: ("input",),
    "/v1/embeddings": ("input",),
    "/tokenize": ("prompt", "messages"),
}
#: How a page is asked for, and its status, its type and what is on it.
Asking = Callable[[str, str, str], tuple[int, str, bytes]]


class Listener:
    """All that is answered, by path.

    Parameters
    ----------
    page
        Answers what engines do not, by method, path and ``authorization``.
    """

    def __init__(self, house: Dispatcher, page: Asking) -> None:
        self._house, self._page = house, page
        self._relays = {path: Relay(house, path, needs) for path, needs in ANSWERED.items()}

    def opened(self, exchange: Exchange) -> None:
        """The head of a request has come: it may be refused before the rest of it has."""
        house = self._house
        exchange.share = BodyShare(house.bodies)
        try:
            if exchange.method == "POST" and exchange.path in self._relays:
                exchange.context = self._relays[exchange.path]
                house.arrived()
                exchange.client = known(house.keys, exchange.field(b"authorization"))
            if length := exchange.fields.get(b"content-length"):
                exchange.share.check(int(length), house.settings.limits)
        except Refusal as refusal:
            exchange.refusal = refusal

    def dropped(self, exchange: Exchange) -> None:
        """A client has left before all of its request had come."""
        if exchange.share is not None:
            exchange.share.leave()
        if exchange.context is not None:
            self._house.ended("cancelled")

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request."""
        try:
            if exchange.context is not None:
                await exchange.context.answer(exchange)
            else:
                self._other(exchange)
        finally:
            if exchange.share is not None:
                exchange.share.leave()

    def _other(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        try:
            if exchange.refusal is not None:
                raise exchange.refusal
            if path in self._relays:
                raise Refusal(405, "method_not_allowed", "Method Not Allowed; see /v1/models.")
            asked = method, path, exchange.field(b"authorization")
            status, kind, content = self._page(*asked)
        except Refusal as refusal:
            allowed = b"POST" if path in self._relays else b"GET, HEAD"
            exchange.refuse(refusal, [(b"allow", allowed)] if refusal.status == 405 else [])
            return
        exchange.reply(status, [(b"content-type", kind.encode())], content)


def known(keys: Mapping[bytes, str], authorization: str) -> str:
    """What logs call who asks; the time does not tell which key was near.

    Raises
    ------
    Refusal
        If there are keys, and the request has none of them.
    """
    if not keys:
        return "anyone"
    kind, _, given = authorization.partition(" ")
    mine = given.strip().encode()
    good = [name for key, name in keys.items() if hmac.compare_digest(mine, key)]
    if not good or kind.lower() != "bearer":
        raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")
    return good[0]
