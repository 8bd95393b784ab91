"""What is answered by path: requests, to the last byte of their engines' answers, and pages."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientTimeout, HttpVersion10, HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from hetero.apps.serving.bodies import Asked, BodyShare, Events, Usage, parsed
from hetero.apps.serving.connections import HEAD_BYTES, too_large
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.engines import WITHOUT_OUTPUT, Seen, Ticket
from hetero.apps.serving.faults import Failed, Fault, Refusal, guilty

#: Paths that engines answer, and what a request has to have one of.
ANSWERED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/embeddings": ("input",),
    "/tokenize": ("prompt", "messages"),
}
# What of the headers of a request is passed on, and how it has to look.
_NAMES = {
    "x-request-id": re.compile("[!-~]{1,128}"),
    "traceparent": re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile("[ -~]{1,512}"),
}
_PASSED = ("content-type", "retry-after")
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*+")')
_MOST = 64 << 20  # bytes of an answer that is not streamed
_MOVED = (301, 302, 303, 307, 308)
_REST_S = (0.1, 0.4)  # before the dispatcher tries again what it was not able to do
_LATEST_S = 3600.0  # that an engine may ask its clients to wait
#: The pages that take no key: balancers have none.
OPEN = ("/health", "/live", "/ready")
_MODELS, _METRICS = "/v1/models", "/metrics"


class App:
    """All that is answered."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._created = dispatcher, int(time.time())

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        try:
            if request.version not in (HttpVersion10, HttpVersion11):
                raise Refusal(505, "http_version", "Ask by HTTP/1.1.")
            head = len(request.path_qs) + sum(len(a) + len(b) for a, b in request.raw_headers)
            if head > HEAD_BYTES:
                raise too_large()
            if request.method == "POST" and request.path in ANSWERED:
                return await self._relayed(request)
            # Others have their turn: aiohttp begins what is pipelined without one.
            await asyncio.sleep(0)
            return self._page(request)
        except Refusal as refusal:
            return refusal.answer()

    async def _relayed(self, request: web.BaseRequest) -> web.StreamResponse:
        dispatcher, names = self._dispatcher, names_of(request.headers)
        dispatcher.meters.received.inc()
        share, outcome = BodyShare(dispatcher.bodies), "cancelled"
        try:
            client = known(dispatcher.keys, _authorization(request))
            content = await self._body(request, share)
            ticket = ticket_of(dispatcher, request.path, content, client, names)
            outcome = ""  # from here on the relay says how it ended
            return await Relay(dispatcher, ticket, request).answer()
        except Refusal as refusal:
            outcome = outcome and "refused"
            answer = refusal.answer()
            answer.headers["x-request-id"] = names["x-request-id"]
            return answer
        except Exception:
            outcome = outcome and "failed"
            raise
        finally:
            share.leave()
            if outcome:
                dispatcher.meters.ended.labels(outcome).inc()

    async def _body(self, request: web.BaseRequest, share: BodyShare) -> bytearray:
        """The body of a request."""
        limits, content = self._dispatcher.settings.limits, bytearray()
        share.check(request.content_length or 0, limits)
        expects = request.headers.get("expect", "").lower() == "100-continue"
        if expects and request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # of the answer
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.content.iter_any():
                    content += part
                    share.grow(len(content), limits)
        except TimeoutError:
            raise Refusal(408, "too_slow", "The request took too long to come.") from None
        except (web.PayloadAccessError, web.RequestPayloadError, ConnectionError):
            raise Refusal(400, "invalid_http", "The body is no HTTP, or broke off.") from None
        connection: Any = request.protocol
        connection.whole()
        return content

    def _page(self, request: web.BaseRequest) -> web.Response:
        """What is not answered by engines."""
        dispatcher, path, authorization = self._dispatcher, request.path, _authorization(request)
        name, status = path.removeprefix(f"{_MODELS}/"), 200
        if path == name and path not in (*OPEN, *ANSWERED, _MODELS, _METRICS):
            raise Refusal(404, "not_found", "Not Found; see /v1/models.")
        if path in ANSWERED or request.method not in ("GET", "HEAD"):
            answer = Refusal(405, "method_not_allowed", "Method Not Allowed.").answer()
            answer.headers["allow"] = "POST" if path in ANSWERED else "GET, HEAD"
            return answer
        if path not in OPEN:
            known(dispatcher.keys, authorization)
        if path == _METRICS:
            text = dispatcher.meters.text(dispatcher)
            return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})
        found: dict[str, Any] = {"live": True}
        if path in ("/ready", "/health"):
            ready = any(one.open for one in dispatcher.engines)
            found, status = {"ready": ready}, 200 if ready else 503
        if path == "/health":
            found = {"status": "ok" if ready else "no engine is up"}
            with suppress(Refusal):  # balancers need none of this
                known(dispatcher.keys, authorization)
                found["router"] = dispatcher.router.name
                found["engines"] = {one.backend.name: one.open for one in dispatcher.engines}
        elif path not in OPEN:
            common = {"object": "model", "created": self._created, "owned_by": "hetero"}
            models = {one: {"id": one} | common for one in dispatcher.models}
            if path != name and name not in models:
                raise Refusal(404, "model_not_found", f"There is no model '{name[:100]}' here.")
            every = {"object": "list", "data": [*models.values()]}
            found = every if path == name else models[name]
        return web.json_response(found, status=status)


def _authorization(request: web.BaseRequest) -> str:
    return ", ".join(request.headers.getall("authorization", ()))  # two are no key


def known(keys: Mapping[bytes, str], authorization: str) -> str:
    """What logs call who asks; the time does not tell which key was near."""
    if not keys:
        return "anyone"
    kind, _, given = authorization.partition(" ")
    mine = given.strip(" ").encode(errors="surrogateescape")
    good = [name for key, name in keys.items() if hmac.compare_digest(mine, key)]
    if not good or kind.lower() != "bearer":
        raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")
    return good[0]


def ticket_of(
    dispatcher: Dispatcher, path: str, content: bytearray, client: str, names: dict[str, str]
) -> Ticket:
    """A request of this body and of these headers; refused if no engine can answer it."""
    body, needs = parsed(content), ANSWERED[path]
    if all(body.get(one) is None for one in needs):
        text = f"The body has no {' or '.join(map(repr, needs))}."
        raise Refusal(400, "invalid_request", text)
    models, wanted = dispatcher.models, str(body.get("model"))
    if wanted not in models:
        known = ", ".join(f"'{one}'" for one in [*models][:10])
        text = f"There is no model '{wanted[:100]}' here; use one of {known}."
        raise Refusal(404, "model_not_found", text)
    asked = Asked.of(body)
    if path in WITHOUT_OUTPUT:
        asked.allowed, asked.stream = 1, False
    asked.headers = names
    return Ticket(asked, client, path, dispatcher.now_s())


class Relay:
    """The answer to a request, from its engines to its client."""

    def __init__(self, dispatcher: Dispatcher, ticket: Ticket, request: web.BaseRequest) -> None:
        self._dispatcher, self._ticket, self._request = dispatcher, ticket, request
        self._name, self._now_s = _Name(ticket.asked.model), asyncio.get_running_loop().time
        self._answer: web.StreamResponse | None = None

    async def answer(self) -> web.StreamResponse:
        """Answer the request."""
        leave, ticket = self._dispatcher.leave, self._ticket
        try:
            usage = await self._attempts()
        except Refusal as refusal:
            # It holds no place while its client reads of it.
            leave(ticket, "failed" if ticket.attempts else "refused")
            if self._answer is None:
                raise
            # With an error that clients raise.
            await self._write(b"data: " + json.dumps(refusal.body()).encode() + b"\n\n")
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            leave(ticket, "cancelled" if cancelled else "failed")
            raise
        else:
            leave(ticket, "failed" if usage is None else "finished", usage)
        assert self._answer is not None
        return self._answer

    async def _attempts(self) -> Usage | None:
        """Ask engines until one answers; the counts, or None where it refused the request."""
        dispatcher, ticket = self._dispatcher, self._ticket
        last: Failed | None = None
        left = dispatcher.settings.limits.retries  # but for what is not the engine's fault
        try:
            while True:
                if last is not None and (left < 0 or self._now_s() >= ticket.deadline_s):
                    raise last.refusal
                try:
                    seen = await dispatcher.place(ticket)
                except Refusal as refusal:
                    if last is None or refusal.code != "all_failed":
                        raise
                    raise last.refusal from None
                ticket.attempts += 1
                try:
                    usage = await self._attempt(seen)
                except Failed as failed:
                    again = failed.stale and not ticket.stale
                    ticket.stale = ticket.stale or failed.stale
                    if failed.fault is Fault.ENGINE and not again:
                        ticket.failed[seen] = failed.refusal.code
                    if ticket.sent:
                        raise failed.refusal from None
                    await dispatcher.failed(ticket, failed.fault, again=again)
                    last = failed
                    if failed.fault is Fault.OWN:
                        await self._rest()
                    else:
                        left -= not again
                    continue
                ticket.answered = True
                if usage is not None:  # of a bad request, failing it says nothing
                    ticket.guilty = guilty(ticket.failed, answered=True)
                return usage
        except Refusal:
            ticket.guilty = guilty(ticket.failed, answered=False)
            raise

    async def _rest(self) -> None:
        """Give the dispatcher time to find what it lacks."""
        waited_s = self._dispatcher.now_s() - self._ticket.arrival_s
        if waited_s > self._dispatcher.settings.limits.queue_s:
            text = "The dispatcher is too busy to reach any engine."
            raise Refusal(503, "overloaded", text, retry_after_s=1.0)
        await asyncio.sleep(random.uniform(*_REST_S))

    async def _attempt(self, seen: Seen) -> Usage | None:
        """Ask one engine; where it fails, others may be asked if the client got nothing."""
        limits, ticket, asked = self._dispatcher.settings.limits, self._ticket, self._ticket.asked
        # An engine may have gone over to other models since it was chosen.
        own = seen.names.get(asked.model, asked.model)
        ticket.lost = begun = False
        ticket.deadline_s = ticket.deadline_s or self._now_s() + limits.request_s
        wait_s = limits.token_s if asked.stream else limits.request_s
        try:
            async with (
                asyncio.timeout_at(ticket.deadline_s) as ticket.scope,
                self._dispatcher.session.post(
                    f"{seen.url}{ticket.path}",
                    data=asked.forwarded(own, usage=seen.backend.usage),
                    headers=seen.headers | asked.headers,
                    timeout=ClientTimeout(sock_connect=limits.connect_s, sock_read=wait_s),
                    allow_redirects=False,
                ) as answer,
            ):
                begun = True
                # Nothing of a redirection is followed, so it is no answer either.
                if answer.status < 200 or answer.status >= 500 or answer.status in (429, *_MOVED):
                    raise busy_or_broken(seen.backend.name, answer)
                if answer.status >= 300 or not asked.stream:
                    return await self._whole(seen, answer)
                return await self._streamed(seen, answer)
        except (OSError, ClientError) as error:
            lost = ticket.lost and isinstance(error, TimeoutError)
            name, sent = seen.backend.name, ticket.sent
            raise Failed.by(error, name, lost=lost, begun=begun, sent=sent) from error
        finally:
            ticket.scope = None

    async def _whole(self, seen: Seen, answer: ClientResponse) -> Usage | None:
        """Pass on an answer that came in one piece, or a refusal of the request."""
        content = bytearray()
        async for part in answer.content.iter_any():
            content += part
            if len(content) > _MOST:
                raise _broken(seen, "answer_too_long", f"sent more than {_MOST >> 20} MiB")
        usage = Usage(seen.backend.kv_tokens)
        good = answer.status < 300
        if good:
            try:
                usage.take(json.loads(content))
            except (ValueError, RecursionError):
                raise _broken(seen, "engine_unintelligible", "sent no JSON") from None
            self._dispatcher.piece(self._ticket, max(usage.output_tokens, 1))
        self._ticket.sent = True
        # In parts, so that it waits for its client.
        told, headers = BytesIO(self._name.put(bytes(content))), self._headers(seen, answer)
        self._answer = web.Response(status=answer.status, body=told, headers=headers)
        return usage if good else None

    async def _streamed(self, seen: Seen, answer: ClientResponse) -> Usage:
        """Pass on a stream as it comes, no faster than its client reads it."""
        ticket = self._ticket
        if answer.content_type != "text/event-stream":
            raise _broken(seen, "engine_unintelligible", f"sent {answer.content_type}, no stream")
        keep = ticket.asked.counts or not seen.backend.usage
        events = Events(keep, Usage(seen.backend.kv_tokens))

        async def take(passed: bytes) -> None:
            if events.pieces > ticket.pieces:
                self._dispatcher.piece(ticket, events.pieces)
            if passed and (ticket.sent or not events.error):
                if not ticket.sent:
                    await self._start(seen, answer)
                await self._write(self._name.put(passed))
            if events.error:
                what = f"{seen.backend.name}: {events.error}"
                raise Failed(Refusal(502, "engine_error", what))

        async for data in answer.content.iter_any():
            await take(events.feed(data))
        await take(events.end())
        if not (events.done or events.finished):
            raise _broken(seen, "engine_broke_off", "broke off its answer")
        if not ticket.sent:
            await self._start(seen, answer)
        return events.usage

    async def _start(self, seen: Seen, answer: ClientResponse) -> None:
        """Begin a stream."""
        self._ticket.sent = True
        self._answer = web.StreamResponse(status=answer.status, headers=self._headers(seen, answer))
        await self._answer.prepare(self._request)

    async def _write(self, data: bytes) -> None:
        """Send part of it; that the client has gone is no error of an engine."""
        assert self._answer is not None
        try:
            await self._answer.write(data)
        except ConnectionError:
            raise asyncio.CancelledError from None

    def _headers(self, seen: Seen, answer: ClientResponse) -> dict[str, str]:
        """Headers of an answer."""
        found = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
        return found | {
            "x-request-id": self._ticket.asked.headers["x-request-id"],
            "x-hetero-engine": seen.backend.name,
            "cache-control": "no-store",
        }


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


def busy_or_broken(name: str, answer: ClientResponse) -> Failed:
    """What an answer is that is none: of an engine that is merely full, or of a broken one."""
    after = answer.headers.get("retry-after")
    if answer.status == 429 or (answer.status == 503 and after is not None):
        try:
            after_s = float(after or 1.0)
        except ValueError:  # a date
            after_s = 1.0
        after_s = min(after_s, _LATEST_S) if math.isfinite(after_s) else 1.0
        what = Refusal(429, "engine_full", f"{name} takes no more.", retry_after_s=after_s)
        return Failed(what, Fault.NOBODY)
    return Failed(Refusal(502, "engine_error", f"{name} answered with status {answer.status}."))


def names_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers by which a request is known elsewhere; it gets a name where it has none."""
    found = {"x-request-id": ""}
    for name, rule in _NAMES.items():
        if rule.fullmatch(value := headers.get(name, "")):
            found[name] = value
    found["x-request-id"] = found["x-request-id"] or f"{random.getrandbits(128):032x}"
    return found


def _broken(seen: Seen, code: str, what: str) -> Failed:
    return Failed(Refusal(502, code, f"{seen.backend.name} {what}."))
