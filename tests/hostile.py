"""An engine that misbehaves as its prompts say, and clients on bare sockets.

A prompt is a number and a mode: ``"17 crash"``. Without a mode, or with one that is not known, the
engine answers as it should. It counts every prompt that it was asked for, and answered in full, so
that a test sees what was lost and what was answered twice.

    python -m tests.hostile --port 8001
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from collections import Counter
from typing import Any

#: What goes wrong at engines, by mode.
FAULTS = (
    *("500", "close", "garbage", "truncated", "gzip", "deep", "moved", "huge", "beyond", "bool"),
    *("crash", "badevent", "errorevent", "endless", "unended", "named", "html"),
)


class Hostile:
    """Answers completions, or fails to."""

    def __init__(self, health: str) -> None:
        self._health = health
        self.begun: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.pages: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path = head.split()[:2]
                length = 0
                for line in head.lower().splitlines():
                    if line.startswith("content-length:"):
                        length = int(line[15:])
                content = await reader.readexactly(length)
                if method == "GET":
                    self._page(writer, path)
                elif not await self._answer(writer, json.loads(content)):
                    break
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    def _page(self, writer: asyncio.StreamWriter, path: str) -> None:
        self.pages[path] += 1
        if path == "/counts":
            found = {"begun": self.begun, "answered": self.answered, "pages": self.pages}
            return reply(writer, found)
        if self._health and path == "/health":
            return raw(writer, f"302 Found\r\nLocation: {self._health}", b"")
        return reply(writer, {"begun": sum(self.begun.values())})

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        """Answer a request; whether the connection may go on."""
        prompt = str(body.get("prompt"))[:100]
        number, _, mode = prompt.partition(" ")
        self.begun[number] += 1
        stream = bool(body.get("stream"))
        words = int(body.get("max_tokens") or 4)
        usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": words}
        if mode == "huge":
            usage["completion_tokens"] = 2**31 - 1
        elif mode == "beyond":
            usage["completion_tokens"] = usage["prompt_tokens"] = 10**400
        elif mode == "bool":
            usage = {"prompt_tokens": True, "completion_tokens": -1}
        elif mode == "500":
            raw(writer, "500 Oh no", b"{}")
            return True
        elif mode == "html":
            raw(writer, "200 OK\r\nContent-Type: text/html", b"<html>oh no</html>")
            return True
        elif mode == "close":
            return False
        elif mode == "moved":
            raw(writer, "307 Moved\r\nLocation: http://127.0.0.1:1/", b"")
            return True
        elif mode in ("garbage", "gzip", "deep", "truncated") and not stream:
            size = 3000 if mode == "truncated" else None
            deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
            text = {"garbage": b"<html>", "gzip": b"\x1f\x8b\x08\x00junk", "deep": deep}
            raw(writer, "200 OK", text.get(mode, b'{"choices"'), size)
            return mode != "truncated"
        if not stream:
            found = {"choices": [{"text": " word" * words}], "usage": usage}
            reply(writer, found)
            if mode == "twice":
                unasked = {"choices": [{"text": "unasked"}]}
                asyncio.get_running_loop().call_later(0.05, reply, writer, unasked)
            self.answered[number] += 1
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        if await self._stream(writer, mode, words, usage):
            self.answered[number] += 1
        return False  # the end of the stream is that of the connection

    async def _stream(
        self, writer: asyncio.StreamWriter, mode: str, words: int, usage: dict[str, Any]
    ) -> bool:
        pace_s = 0.05 if mode == "slow" else 0.0
        for k in range(words):
            reason = "length" if k == words - 1 else None
            choice = {"text": " word", "finish_reason": reason}
            before = b": hello\nevent: piece\n" if mode == "named" else b""
            if k == 1:
                if mode == "crash":
                    return False
                if mode in ("badevent", "deep", "garbage", "gzip"):
                    writer.write(b'data: {"error"' + b'{"a":' * 100_000 + b"\n\n")
                    return False
                if mode == "errorevent":
                    writer.write(b'data: {"error":{"message":"out of memory"}}\n\n')
                    return False
                if mode == "endless":
                    for _ in range(48):
                        writer.write(b"x" * 262_144)
                        await writer.drain()
                    return False
            if mode == "flood":
                choice["text"] = " word" * 10_000
            writer.write(before + b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await writer.drain()
            await asyncio.sleep(pace_s)
        writer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        writer.write(b"data: [DONE]" if mode == "unended" else b"data: [DONE]\n\n")
        await writer.drain()
        return True


def raw(writer: asyncio.StreamWriter, status: str, content: bytes, size: int | None = None) -> None:
    length = len(content) if size is None else size
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + content)


def reply(writer: asyncio.StreamWriter, found: Any) -> None:
    # The numbers of "beyond" have more digits than Python writes by default.
    sys.set_int_max_str_digits(0)
    raw(writer, "200 OK\r\nContent-Type: application/json", json.dumps(found).encode())


def connect(url: str, *, receive: int | None = None, limit_s: float = 60.0) -> socket.socket:
    """A connection of a client that does as it likes.

    Parameters
    ----------
    receive
        Size of its buffer for what it is sent [bytes].
    """
    line = socket.socket()
    line.settimeout(limit_s)
    if receive is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    line.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return line


def request(
    body: Any, path: str = "/v1/completions", *, method: str = "POST", length: int | None = None
) -> bytes:
    """The bytes of a request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    count = len(content) if length is None else length
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {count}\r\n\r\n".encode() + content
    )


def completion(prompt: str, **fields: Any) -> bytes:
    """A request for a completion."""
    return request({"model": "m", "prompt": prompt, "max_tokens": 4} | fields)


def ended(line: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    found = b""
    try:
        while more := line.recv(65536):
            found += more
    except ConnectionError:
        pass
    return found


def asked(url: str, content: bytes) -> tuple[int, bytes]:
    """Status and text of the answer to one request."""
    with connect(url) as line:
        line.sendall(content.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        reply = ended(line)
    return (int(reply.split()[1]) if reply else 0), reply


async def _main(port: int, health: str) -> None:
    server = await asyncio.start_server(
        Hostile(health).serve, "127.0.0.1", port, limit=1 << 24, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--health", default="")
    chosen = parser.parse_args()
    asyncio.run(_main(chosen.port, chosen.health))
