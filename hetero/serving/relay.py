"""One request, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from hetero.serving.dispatcher import Dispatcher
from hetero.serving.engines import Seen
from hetero.serving.events import Events, Usage
from hetero.serving.faults import Failed, Refusal
from hetero.serving.tickets import Ticket

log = logging.getLogger("hetero.serving")
Send = Callable[[dict[str, Any]], Awaitable[None]]
_PASSED = {b"content-type", b"retry-after", b"x-request-id"}
_MOST = 64 << 20  # bytes of an answer that is not streamed


class Relay:
    """Answers requests for one path, such as ``/v1/completions``."""

    def __init__(self, dispatcher: Dispatcher, path: str) -> None:
        self._dispatcher, self._path = dispatcher, path

    async def answer(self, body: dict[str, Any], send: Send) -> str:
        """Answer a request; how it ended, see :data:`hetero.serving.metrics.OUTCOMES`."""
        dispatcher = self._dispatcher
        ticket = Ticket(
            body,
            dispatcher.lengths.prompt(body),
            dispatcher.lengths.output(body),
            dispatcher.now_s(),
        )
        outputs, finished = 0, False
        try:
            dispatcher.admit(ticket)
            usage = await self._attempts(ticket, send)
            finished = usage is not None
            if usage is not None:
                outputs = self._learn(ticket, usage)
            return "finished" if finished else "failed"
        except Refusal as refusal:
            if ticket.sent:
                await _end_broken(send, refusal)
                return "failed"
            await send_error(send, refusal)
            return "refused" if ticket.attempts == 0 else "failed"
        finally:
            dispatcher.leave(ticket, outputs, finished=finished)

    def _learn(self, ticket: Ticket, usage: Usage) -> int:
        dispatcher, seen = self._dispatcher, ticket.engine
        assert seen is not None
        if usage.input_tokens:
            dispatcher.lengths.learn(ticket.body, usage.input_tokens, usage.output_tokens)
            ticket.input_tokens = usage.input_tokens
        outputs = usage.output_tokens or ticket.pieces
        dispatcher.meters.served(
            ticket, seen.backend.name, dispatcher.now_s(), ticket.input_tokens, outputs
        )
        return outputs

    async def _attempts(self, ticket: Ticket, send: Send) -> Usage | None:
        """Ask engines until one answers; the counts, or None where it refused the request."""
        dispatcher = self._dispatcher
        last: Failed | None = None
        retries = dispatcher.settings.limits.retries
        while True:
            if last is not None and ticket.attempts - ticket.stale > retries:
                raise last.refusal
            try:
                seen = await dispatcher.place(ticket)
            except Refusal as refusal:
                if last is not None and refusal.code == "all_failed":
                    raise last.refusal from None
                raise
            ticket.attempts += 1
            try:
                usage = await self._attempt(ticket, seen, send)
            except Failed as failed:
                dispatcher.meters.attempt(seen.backend.name, "failed")
                again = failed.stale and not ticket.stale
                ticket.stale = ticket.stale or failed.stale
                blames = failed.blames and not again
                dispatcher.failed(ticket, hard=failed.hard, blames=blames, again=again)
                last = failed
                continue
            except Refusal:
                dispatcher.meters.attempt(seen.backend.name, "broken")
                seen.ill(dispatcher.now_s())
                raise
            dispatcher.meters.attempt(seen.backend.name, "refused" if usage is None else "finished")
            seen.well()
            return usage

    async def _attempt(self, ticket: Ticket, seen: Seen, send: Send) -> Usage | None:
        """Ask one engine.

        Raises
        ------
        Failed
            If it brought nothing and the client got nothing.
        Refusal
            If it broke off an answer that the client has begun to get.
        """
        dispatcher = self._dispatcher
        assert dispatcher.session is not None
        limits, name = dispatcher.settings.limits, seen.backend.name
        wait = aiohttp.ClientTimeout(
            total=None,
            sock_connect=limits.connect_s,
            sock_read=limits.token_s if ticket.stream else limits.request_s,
        )
        ticket.lost = False
        try:
            async with asyncio.timeout(limits.request_s) as ticket.scope:
                async with dispatcher.session.post(
                    seen.backend.url + self._path,
                    data=self._body(ticket, seen),
                    headers=seen.headers(),
                    timeout=wait,
                    allow_redirects=False,
                ) as answer:
                    if answer.status == 429 or answer.status >= 500:
                        raise _busy_or_broken(name, answer.status, answer.headers)
                    if answer.status >= 300 or not ticket.stream:
                        return await self._whole(ticket, seen, answer, send)
                    return await self._streamed(ticket, seen, answer, send)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            text = f"{name} cannot be reached."
            raise Failed(Refusal(502, "engine_unreachable", text), hard=True) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and ticket.lost:
                what = Refusal(502, "engine_lost", f"{name} was lost before it answered.")
            elif isinstance(error, TimeoutError):
                what = Refusal(504, "engine_timeout", f"{name} took too long to answer.")
            else:
                what = Refusal(502, "engine_broke_off", f"{name} broke off its answer.")
            if ticket.sent:
                raise what from error
            silent = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            raise Failed(what, stale=silent) from error
        finally:
            ticket.scope = None

    def _body(self, ticket: Ticket, seen: Seen) -> bytes:
        body = dict(ticket.body)
        body["model"] = seen.backend.model or self._dispatcher.settings.model
        if ticket.stream and seen.backend.usage:
            asked = body.get("stream_options")
            options = dict(asked) if isinstance(asked, dict) else {}
            body["stream_options"] = options | {"include_usage": True}
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()

    async def _whole(
        self, ticket: Ticket, seen: Seen, answer: aiohttp.ClientResponse, send: Send
    ) -> Usage | None:
        """Pass on an answer that came in one piece, or a refusal of the request."""
        content = bytearray()
        async for part in answer.content.iter_any():
            content += part
            if len(content) > _MOST:
                text = f"{seen.backend.name} sent more than {_MOST >> 20} MiB."
                raise Failed(Refusal(502, "answer_too_long", text))
        usage = Usage()
        good = answer.status < 300
        if good:
            try:
                usage.take(json.loads(content))
            except ValueError:
                text = f"{seen.backend.name} sent an answer that is no JSON."
                raise Failed(Refusal(502, "engine_unintelligible", text)) from None
            self._dispatcher.piece(ticket, max(usage.output_tokens, 1))
        ticket.sent = True
        await send(_start(answer, seen))
        await send({"type": "http.response.body", "body": bytes(content), "more_body": False})
        return usage if good else None

    async def _streamed(
        self, ticket: Ticket, seen: Seen, answer: aiohttp.ClientResponse, send: Send
    ) -> Usage:
        """Pass on a stream as it comes."""
        options = ticket.body.get("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        events = Events(keep_usage=asked or not seen.backend.usage)
        async for data in answer.content.iter_any():
            passed = events.feed(data)
            self._dispatcher.piece(ticket, events.pieces)
            if events.error:
                what = Refusal(502, "engine_error", f"{seen.backend.name}: {events.error}")
                raise what if ticket.sent else Failed(what)
            if not passed:
                continue
            if not ticket.sent:
                ticket.sent = True
                await send(_start(answer, seen))
            await send({"type": "http.response.body", "body": passed, "more_body": True})
        if not (events.done or events.finished):
            what = Refusal(502, "engine_broke_off", f"{seen.backend.name} broke off its answer.")
            raise what if ticket.sent else Failed(what)
        if not ticket.sent:
            ticket.sent = True
            await send(_start(answer, seen))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return events.usage


def _busy_or_broken(name: str, status: int, headers: Any) -> Failed:
    if status == 429 or (status == 503 and "retry-after" in headers):
        try:
            after_s = float(headers.get("retry-after", 1.0))
        except ValueError:  # a date
            after_s = 1.0
        what = Refusal(429, "engine_full", f"{name} takes no more.", retry_after_s=after_s)
        return Failed(what, blames=False)
    return Failed(Refusal(502, "engine_error", f"{name} answered with status {status}."))


def _start(answer: aiohttp.ClientResponse, seen: Seen) -> dict[str, Any]:
    headers = [
        (name.lower(), value) for name, value in answer.raw_headers if name.lower() in _PASSED
    ]
    headers += [(b"x-hetero-engine", seen.backend.name.encode()), (b"cache-control", b"no-store")]
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def send_error(send: Send, refusal: Refusal) -> None:
    """Answer with an error and nothing else."""
    headers = [(b"content-type", b"application/json")]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(refusal.retry_after_s))).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    content = json.dumps(refusal.body()).encode()
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def _end_broken(send: Send, refusal: Refusal) -> None:
    """End a stream that cannot be completed with an error that clients raise."""
    event = b"data: " + json.dumps(refusal.body()).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
