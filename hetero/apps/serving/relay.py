"""One request, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Mapping

from hetero.apps.serving.bodies import Asked, parsed
from hetero.apps.serving.connections import Exchange
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.engines import Seen
from hetero.apps.serving.events import Events, Usage
from hetero.apps.serving.faults import Failed, Fault, Refusal
from hetero.apps.serving.lines import EngineLine
from hetero.apps.serving.tickets import WITHOUT_OUTPUT, Ticket

_PASSED = {b"content-type", b"retry-after"}
# What of the headers of a request is passed on, and how it has to look.
_NAMES = {
    b"x-request-id": re.compile("[!-~]{1,128}"),
    b"traceparent": re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    b"tracestate": re.compile("[ -~]{1,512}"),
}
RESPONSES = "/v1/responses"
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*+")')
_MOST = 64 << 20  # bytes of an answer that is not streamed
_MOVED = (301, 302, 303, 307, 308)
_REST_S = (0.1, 0.4)  # before the dispatcher tries again what it was not able to do


class Relay:
    """Answers requests for one path.

    Parameters
    ----------
    path
        Such as ``/v1/completions``.
    needs
        Fields of which a request has to have one.
    """

    def __init__(self, house: Dispatcher, path: str, needs: tuple[str, ...]) -> None:
        self._house, self._path, self._needs = house, path, needs

    async def answer(self, client: Exchange) -> None:
        """Answer a request."""
        names, house = _names(client), self._house
        try:
            if client.refusal is not None:
                raise client.refusal
            asked = self._read(client.body)
        except Exception as error:
            house.ended("refused" if isinstance(error, Refusal) else "failed")
            if not isinstance(error, Refusal):
                raise
            client.refuse(error, _told(names))
            return
        asked.headers = names
        client.body = bytearray()
        ticket = Ticket(asked, client.client, self._path, house.now_s())
        try:
            usage = await self._attempts(ticket, client)
        except Refusal as refusal:
            # It holds no place while its client reads of it.
            house.leave(ticket, "failed" if ticket.attempts else "refused")
            if ticket.sent:
                # With an error that clients raise.
                client.write(b"data: " + json.dumps(refusal.body()).encode() + b"\n\n")
                client.end()
            else:
                client.refuse(refusal, _told(names))
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            house.leave(ticket, "cancelled" if cancelled else "failed")
            raise
        else:
            house.leave(ticket, "failed" if usage is None else "finished", usage)

    def _read(self, content: bytearray) -> Asked:
        body, long = parsed(content)
        if all(body.get(one) is None for one in self._needs):
            text = f"The body has no {' or '.join(map(repr, self._needs))}."
            raise Refusal(400, "invalid_request", text)
        models, wanted = self._house.models, str(body.get("model"))
        if wanted not in models:
            known = ", ".join(f"'{one}'" for one in [*models][:10])
            text = f"There is no model '{wanted[:100]}' here; use one of {known}."
            raise Refusal(404, "model_not_found", text)
        asked = Asked.of(body, long)
        if self._path in WITHOUT_OUTPUT:
            asked.allowed, asked.stream = 1, False
        return asked

    async def _attempts(self, ticket: Ticket, client: Exchange) -> Usage | None:
        """Ask engines until one answers; the counts, or None where it refused the request."""
        house = self._house
        last: Failed | None = None
        limits = house.settings.limits
        own = 0  # attempts that the dispatcher was not able to make
        anew = False
        try:
            while True:
                if last is not None and (
                    ticket.attempts - ticket.stale - own > limits.retries
                    or time.monotonic() >= ticket.deadline_s
                ):
                    raise last.refusal
                try:
                    seen = await house.place(ticket, anew=anew)
                except Refusal as refusal:
                    if last is None or refusal.code != "all_failed":
                        raise
                    if last.fault is not Fault.OWN:
                        raise last.refusal from None
                    anew = True
                    continue
                anew = False
                ticket.attempts += 1
                try:
                    usage = await self._attempt(ticket, seen, client)
                except Failed as failed:
                    again = failed.stale and not ticket.stale
                    ticket.stale = ticket.stale or failed.stale
                    if failed.fault is Fault.ENGINE and not again:
                        ticket.case.add(seen, failed.refusal.code)
                    if ticket.sent:
                        raise failed.refusal from None
                    await house.failed(ticket, failed.fault, again=again)
                    if failed.fault is Fault.OWN:
                        own += 1
                        await self._rest(ticket, failed)
                    last = failed
                    continue
                ticket.answered = True
                if usage is not None:  # of a bad request, failing it says nothing
                    ticket.guilty = ticket.case.guilty(answered=True)
                return usage
        except Refusal:
            ticket.guilty = ticket.case.guilty(answered=False)
            raise

    async def _rest(self, ticket: Ticket, failed: Failed) -> None:
        """Give the dispatcher time to find what it lacks."""
        limits = self._house.settings.limits
        if self._house.now_s() - ticket.arrival_s > limits.queue_s:
            text = "The dispatcher is too busy to reach any engine."
            raise Refusal(503, "overloaded", text, retry_after_s=1.0) from failed
        await asyncio.sleep(random.uniform(*_REST_S))

    async def _attempt(self, ticket: Ticket, seen: Seen, client: Exchange) -> Usage | None:
        """Ask one engine.

        Raises
        ------
        Failed
            If it did not answer in full; others may be asked if the client got nothing.
        """
        house = self._house
        limits, asked = house.settings.limits, ticket.asked
        ticket.lost = False
        if not ticket.deadline_s:
            ticket.deadline_s = time.monotonic() + limits.request_s
        usage = seen.backend.usage and self._path != RESPONSES  # which tells of itself
        # An engine may have gone over to other models since it was chosen.
        body = asked.forwarded(seen.names.get(asked.model, asked.model), usage=usage)
        more = "".join([f"{name}: {value}\r\n" for name, value in asked.headers.items()])
        more += f"content-length: {sum(map(len, body))}\r\n\r\n"
        parts = [seen.address.head("POST", self._path), more.encode(), *body]
        try:
            line = house.pool.idle(seen.address) or await self._connected(ticket, seen)
            ticket.line = line
            try:
                if asked.stream:
                    line.ask(parts, limits.token_s, ticket.deadline_s)
                else:
                    line.ask(parts, limits.request_s, ticket.deadline_s, _MOST)
                await line.head()
                # Nothing of a redirection is followed, so it is no answer either.
                if line.status in (429, *_MOVED) or line.status >= 500:
                    raise _busy_or_broken(seen.backend.name, line)
                if line.status >= 300 or not asked.stream:
                    return await self._whole(ticket, seen, line, client)
                return await self._streamed(ticket, seen, line, client)
            finally:
                house.pool.back(line)
        except OSError as error:
            lost = ticket.lost and isinstance(error, TimeoutError)
            raise Failed.by(error, seen.backend.name, lost=lost, sent=ticket.sent) from error
        finally:
            ticket.line = None

    async def _connected(self, ticket: Ticket, seen: Seen) -> EngineLine:
        """A new connection, or the word that the time is up."""
        limit_s = self._house.settings.limits.connect_s
        try:
            async with asyncio.timeout_at(ticket.deadline_s) as ticket.scope:
                return await self._house.pool.line(seen.address, limit_s)
        finally:
            ticket.scope = None

    async def _whole(
        self, ticket: Ticket, seen: Seen, line: EngineLine, client: Exchange
    ) -> Usage | None:
        """Pass on an answer that came in one piece, or a refusal of the request."""
        content = await line.whole(_MOST)
        if content is None:
            text = f"{seen.backend.name} sent more than {_MOST >> 20} MiB."
            raise Failed(Refusal(502, "answer_too_long", text))
        usage = Usage(seen.backend.kv_tokens)
        good = line.status < 300
        if good:
            try:
                usage.take(json.loads(content))
            except (ValueError, RecursionError):
                text = f"{seen.backend.name} sent an answer that is no JSON."
                raise Failed(Refusal(502, "engine_unintelligible", text)) from None
            self._house.piece(ticket, max(usage.output_tokens, 1))
        ticket.sent = True
        content = _Name(ticket.asked.model).put(content)
        client.reply(line.status, _fields(line, seen, ticket.asked), content)
        return usage if good else None

    async def _streamed(
        self, ticket: Ticket, seen: Seen, line: EngineLine, client: Exchange
    ) -> Usage:
        """Pass on a stream as it comes."""
        events = Events(
            keep_usage=ticket.asked.counts or not seen.backend.usage,
            usage=Usage(seen.backend.kv_tokens),
            most_bytes=self._house.settings.limits.event_bytes,
            responses=self._path == RESPONSES,
        )
        name = _Name(ticket.asked.model)

        def begin() -> None:
            if not ticket.sent:
                ticket.sent = True
                client.start(line.status, _fields(line, seen, ticket.asked))

        def take(data: bytes) -> None:
            passed = events.feed(data) if data else events.end()
            if events.pieces > ticket.pieces:
                self._house.piece(ticket, events.pieces)
            if passed and (ticket.sent or not events.error):
                begin()
                client.write(name.put(passed))
            if events.error:
                what = f"{seen.backend.name}: {events.error}"
                raise Failed(Refusal(502, "engine_error", what))
            if data:
                return
            if not (events.done or events.finished):
                text = f"{seen.backend.name} broke off its answer."
                raise Failed(Refusal(502, "engine_broke_off", text))
            begin()
            client.end()

        await line.relay(take, client.line)
        return events.usage


class _Name:
    """Puts the model that was asked for in place of the engine's own name for it.

    In JSON a quote of a string is escaped: what is looked for is never part of a text.
    """

    def __init__(self, asked: str) -> None:
        self._asked = json.dumps(asked).encode()
        self._pair: tuple[bytes, bytes] | None = None

    def put(self, content: bytes) -> bytes:
        if self._pair is None:
            if (found := _MODEL.search(content)) is None:
                return content
            self._pair = found[0], found[0].replace(found[1], self._asked)
        old, new = self._pair
        return content if old == new else content.replace(old, new)


def _busy_or_broken(name: str, line: EngineLine) -> Failed:
    after = dict(line.headers).get(b"retry-after")
    if line.status == 429 or (line.status == 503 and after is not None):
        try:
            after_s = float(after or 1.0)
        except ValueError:  # a date
            after_s = 1.0
        what = Refusal(429, "engine_full", f"{name} takes no more.", retry_after_s=after_s)
        return Failed(what, Fault.NOBODY)
    return Failed(Refusal(502, "engine_error", f"{name} answered with status {line.status}."))


def _names(client: Exchange) -> dict[str, str]:
    """Headers by which a request is known elsewhere; it gets a name where it has none."""
    found = {"x-request-id": ""}
    for name, rule in _NAMES.items():
        if name in client.fields and rule.fullmatch(value := client.field(name)):
            found[name.decode()] = value
    found["x-request-id"] = found["x-request-id"] or f"{random.getrandbits(128):032x}"
    return found


def _told(names: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(b"x-request-id", names["x-request-id"].encode())]


def _fields(line: EngineLine, seen: Seen, asked: Asked) -> list[tuple[bytes, bytes]]:
    """Headers of an answer."""
    found = [one for one in line.headers if one[0] in _PASSED]
    found += _told(asked.headers)
    found += [(b"x-hetero-engine", seen.backend.name.encode()), (b"cache-control", b"no-store")]
    return found
