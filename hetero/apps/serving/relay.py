"""One request, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from hetero.apps.serving.bodies import Asked
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.engines import Seen
from hetero.apps.serving.events import Events, Usage
from hetero.apps.serving.faults import Failed, Fault, Refusal
from hetero.apps.serving.tickets import Ticket

Send = Callable[[dict[str, Any]], Awaitable[None]]
_PASSED = {b"content-type", b"retry-after", b"x-request-id"}
#: Paths that engines answer without generating anything.
WITHOUT_OUTPUT = ("/v1/embeddings", "/tokenize")
_MOST = 64 << 20  # bytes of an answer that is not streamed
_MOVED = (301, 302, 303, 307, 308)
_REST_S = (0.1, 0.4)  # before the dispatcher tries again what it was not able to do


class Relay:
    """Answers requests for one path, such as ``/v1/completions``."""

    def __init__(self, dispatcher: Dispatcher, path: str) -> None:
        self._dispatcher, self._path = dispatcher, path

    async def answer(self, asked: Asked, send: Send) -> str:
        """Answer a request; how it ended, see :data:`hetero.apps.serving.metrics.OUTCOMES`."""
        dispatcher = self._dispatcher
        ticket = Ticket(
            asked,
            dispatcher.lengths.prompt(asked.prompt),
            dispatcher.lengths.output(asked.allowed, asked.copies, endless=asked.endless),
            dispatcher.now_s(),
        )
        outputs, finished, outcome = 0, False, "failed"
        try:
            dispatcher.admit(ticket)
            usage = await self._attempts(ticket, send)
            finished = usage is not None
            if usage is not None:
                outputs = self._learn(ticket, usage)
            outcome = "finished" if finished else "failed"
        except Refusal as refusal:
            # It holds no place while its client reads of it.
            dispatcher.leave(ticket, 0, finished=False)
            if ticket.sent:
                await _end_broken(send, refusal)
                outcome = "failed"
            else:
                outcome = "refused" if ticket.attempts == 0 else "failed"
                await send_error(send, refusal, asked.headers)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            if dispatcher.request_log is not None:
                dispatcher.request_log.write(
                    ticket, self._path, outcome, outputs, dispatcher.now_s()
                )
            dispatcher.leave(ticket, outputs, finished=finished)
        return outcome

    def _learn(self, ticket: Ticket, usage: Usage) -> int:
        dispatcher, seen = self._dispatcher, ticket.engine
        assert seen is not None
        if usage.input_tokens:
            ticket.input_tokens = usage.input_tokens
        if usage.input_tokens and self._path not in WITHOUT_OUTPUT:
            dispatcher.lengths.learn(ticket.asked.prompt, usage.input_tokens, usage.output_tokens)
        outputs = usage.output_tokens or ticket.pieces
        dispatcher.meters.served(
            ticket, seen.backend.name, dispatcher.now_s(), ticket.input_tokens, outputs
        )
        return outputs

    async def _attempts(self, ticket: Ticket, send: Send) -> Usage | None:
        """Ask engines until one answers; the counts, or None where it refused the request."""
        dispatcher = self._dispatcher
        last: Failed | None = None
        limits = dispatcher.settings.limits
        own = 0  # attempts that the dispatcher was not able to make
        try:
            while True:
                if last is not None and (
                    ticket.attempts - ticket.stale - own > limits.retries
                    or asyncio.get_running_loop().time() >= ticket.deadline_s
                ):
                    raise last.refusal
                try:
                    seen = await dispatcher.place(ticket)
                except Refusal as refusal:
                    if last is None or refusal.code != "all_failed":
                        raise
                    if last.fault is not Fault.OWN:
                        raise last.refusal from None
                    ticket.avoid.clear()
                    continue
                ticket.attempts += 1
                try:
                    usage = await self._attempt(ticket, seen, send)
                except Failed as failed:
                    dispatcher.meters.attempt(
                        seen.backend.name, "broken" if ticket.sent else "failed"
                    )
                    again = failed.stale and not ticket.stale
                    ticket.stale = ticket.stale or failed.stale
                    if failed.fault is Fault.ENGINE and not again:
                        ticket.case.add(seen, failed.refusal.code)
                    if ticket.sent:
                        raise failed.refusal from None
                    await dispatcher.failed(ticket, failed, again=again)
                    if failed.fault is Fault.OWN:
                        own += 1
                        await self._rest(ticket, failed)
                    last = failed
                    continue
                outcome = "refused" if usage is None else "finished"
                dispatcher.meters.attempt(seen.backend.name, outcome)
                seen.well()
                if usage is not None:  # of a bad request, failing it says nothing
                    dispatcher.judge(ticket, answered=True)
                return usage
        except Refusal:
            dispatcher.judge(ticket, answered=False)
            raise

    async def _rest(self, ticket: Ticket, failed: Failed) -> None:
        """Give the dispatcher time to find what it lacks."""
        limits = self._dispatcher.settings.limits
        if self._dispatcher.now_s() - ticket.arrival_s > limits.queue_s:
            text = "The dispatcher is too busy to reach any engine."
            raise Refusal(503, "overloaded", text, retry_after_s=1.0) from failed
        await asyncio.sleep(random.uniform(*_REST_S))

    async def _attempt(self, ticket: Ticket, seen: Seen, send: Send) -> Usage | None:
        """Ask one engine.

        Raises
        ------
        Failed
            If it did not answer in full; others may be asked if the client got nothing.
        """
        dispatcher = self._dispatcher
        assert dispatcher.session is not None
        limits, asked = dispatcher.settings.limits, ticket.asked
        wait = aiohttp.ClientTimeout(
            total=None,
            sock_connect=limits.connect_s,
            sock_read=limits.token_s if asked.stream else limits.request_s,
        )
        ticket.lost = False
        if not ticket.deadline_s:
            ticket.deadline_s = asyncio.get_running_loop().time() + limits.request_s
        try:
            async with asyncio.timeout_at(ticket.deadline_s) as ticket.scope:
                async with dispatcher.session.post(
                    seen.backend.url + self._path,
                    data=asked.forwarded(
                        seen.backend.model or dispatcher.settings.model, usage=seen.backend.usage
                    ),
                    headers=seen.headers() | asked.headers,
                    timeout=wait,
                    allow_redirects=False,
                ) as answer:
                    # Nothing of a redirection is followed, so it is no answer either.
                    if answer.status in (429, *_MOVED) or answer.status >= 500:
                        raise _busy_or_broken(seen.backend.name, answer.status, answer.headers)
                    if answer.status >= 300 or not asked.stream:
                        return await self._whole(ticket, seen, answer, send)
                    return await self._streamed(ticket, seen, answer, send)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            lost = ticket.lost and isinstance(error, TimeoutError)
            raise Failed.by(error, seen.backend.name, lost=lost, sent=ticket.sent) from error
        finally:
            ticket.scope = None

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
        usage = Usage(seen.backend.kv_tokens)
        good = answer.status < 300
        if good:
            try:
                usage.take(json.loads(content))
            except (ValueError, RecursionError):
                text = f"{seen.backend.name} sent an answer that is no JSON."
                raise Failed(Refusal(502, "engine_unintelligible", text)) from None
            self._dispatcher.piece(ticket, max(usage.output_tokens, 1))
        ticket.sent = True
        await send(_start(answer, seen, ticket.asked))
        await send({"type": "http.response.body", "body": bytes(content), "more_body": False})
        return usage if good else None

    async def _streamed(
        self, ticket: Ticket, seen: Seen, answer: aiohttp.ClientResponse, send: Send
    ) -> Usage:
        """Pass on a stream as it comes."""
        limits = self._dispatcher.settings.limits
        events = Events(
            keep_usage=ticket.asked.counts or not seen.backend.usage,
            usage=Usage(seen.backend.kv_tokens),
            most_bytes=limits.event_bytes,
        )

        while True:
            data = await answer.content.readany()
            passed = events.feed(data) if data else events.end()
            self._dispatcher.piece(ticket, events.pieces)
            if passed and (ticket.sent or not events.error):
                if not ticket.sent:
                    ticket.sent = True
                    await send(_start(answer, seen, ticket.asked))
                await send({"type": "http.response.body", "body": passed, "more_body": True})
            if events.error:
                what = f"{seen.backend.name}: {events.error}"
                raise Failed(Refusal(502, "engine_error", what))
            if not data:
                break
        if not (events.done or events.finished):
            text = f"{seen.backend.name} broke off its answer."
            raise Failed(Refusal(502, "engine_broke_off", text))
        if not ticket.sent:
            ticket.sent = True
            await send(_start(answer, seen, ticket.asked))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return events.usage


def _busy_or_broken(name: str, status: int, headers: Any) -> Failed:
    if status == 429 or (status == 503 and "retry-after" in headers):
        try:
            after_s = float(headers.get("retry-after", 1.0))
        except ValueError:  # a date
            after_s = 1.0
        what = Refusal(429, "engine_full", f"{name} takes no more.", retry_after_s=after_s)
        return Failed(what, Fault.NOBODY)
    return Failed(Refusal(502, "engine_error", f"{name} answered with status {status}."))


def _start(answer: aiohttp.ClientResponse, seen: Seen, asked: Asked) -> dict[str, Any]:
    headers = [
        (name.lower(), value) for name, value in answer.raw_headers if name.lower() in _PASSED
    ]
    if name := asked.headers.get("x-request-id"):
        headers = [one for one in headers if one[0] != b"x-request-id"]
        headers.append((b"x-request-id", name.encode()))
    headers += [(b"x-hetero-engine", seen.backend.name.encode()), (b"cache-control", b"no-store")]
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def send_error(send: Send, refusal: Refusal, names: Mapping[str, str] | None = None) -> None:
    """Answer with an error and nothing else, under the names of the request."""
    found = refusal.headers() | {"x-request-id": (names or {}).get("x-request-id", "")}
    headers = [(name.encode(), value.encode()) for name, value in found.items() if value]
    content = json.dumps(refusal.body()).encode()
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def _end_broken(send: Send, refusal: Refusal) -> None:
    """End a stream that cannot be completed with an error that clients raise."""
    event = b"data: " + json.dumps(refusal.body()).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
