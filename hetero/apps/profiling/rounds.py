"""Rounds of requests against a server, each kept as it ends, so that a stopped profile goes on."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hetero.apps.profiling.endpoint import Endpoint, Reply
from hetero.apps.profiling.settings import Prompts, Setting
from hetero.display import Column, Shown, Table
from hetero.errors import DataError, EndpointError, require
from hetero.files import check_new
from hetero.latency.tables import KeptFor
from hetero.streams import stream

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PROBES = (8, 64)  # words of the prompts that show how many tokens a word has
_REFUSED = (400, 422)  # statuses of engines that do not know ignore_eos

COLUMNS = (
    *("phase", "batch", "input_tokens", "context_tokens", "seconds", "round"),
    *("asked_input_tokens", "asked_output_tokens", "model", "kept_for"),
)


@dataclass(frozen=True, slots=True)
class ProfileLimits:
    """What a profile may cost the server.

    Attributes
    ----------
    seconds
        A round that would probably end later than this after the start does not begin [s].
    tokens
        Prompt and output tokens of all rounds together, warm-up included.
    """

    seconds: float = float("inf")
    tokens: float = float("inf")

    def __post_init__(self) -> None:
        require(
            self.seconds > 0 and self.tokens > 0,
            f"Limits of {self.seconds:g} s and {self.tokens:g} tokens allow nothing.",
            resolve="allow more than 0 of both.",
        )


@dataclass(frozen=True, slots=True)
class Profile(Shown):
    """What was measured, and what is still missing.

    Attributes
    ----------
    path
        CSV file of the measurements, as :func:`hetero.latency.read_csv` reads it.
    done, planned
        Rounds in the file that were asked for, and all that were asked for.
    sent
        Rounds that this call sent.
    stopped
        Why rounds are missing, empty if none is.
    seconds, tokens
        What the calls took of their limits.
    """

    path: Path
    done: int
    planned: int
    sent: int
    stopped: str
    seconds: float = 0.0
    tokens: float = 0.0

    def table(self) -> Table:
        """One row."""
        columns = (
            Column("rounds", of="done"),
            Column("planned"),
            Column("sent now", of="sent"),
            Column("file", of="path"),
        )
        return Table.of("Profile", columns, [self], self.stopped)


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of one round.

    Attributes
    ----------
    prefill_s
        From the first request sent to the last first token [s].
    decode_s
        Mean time between tokens while every request of the round decoded [s], None where the
        outputs were too short for that.
    context_tokens
        Mean cached tokens of a request meanwhile.
    """

    input_tokens: float
    prefill_s: float
    decode_s: float | None
    context_tokens: float


def steps(replies: Sequence[Reply]) -> Steps:
    """Prefill and decode step times that the replies of one round show.

    Requests sent together are prefilled one after the other or together, as the engine likes; the
    time to the last first token is what the prefill of the whole batch took. From then to the
    first end all of them decode in every step.

    Examples
    --------
    >>> a = Reply(10, 5, 0.0, (1.0, 1.5, 2.0, 2.5, 3.0))
    >>> b = Reply(10, 5, 0.0, (1.5, 2.0, 2.5, 3.0, 3.5))
    >>> found = steps([a, b])
    >>> found.prefill_s, found.decode_s
    (1.5, 0.5)
    """
    start = max(reply.chunk_s[0] for reply in replies)
    end = min(reply.chunk_s[-1] for reply in replies)
    inputs = float(np.mean([reply.input_tokens for reply in replies]))
    prefill = start - min(reply.sent_s for reply in replies)
    counts, contexts = [], []
    for reply in replies:
        times = np.asarray(reply.chunk_s)
        # An engine may send several tokens in one piece.
        per_chunk = reply.output_tokens / len(times)
        before, after = np.searchsorted(times, [start, end], side="right")
        counts.append((after - before) * per_chunk)
        contexts.append(reply.input_tokens + (before + after) / 2 * per_chunk)
    tokens = float(np.mean(counts))
    seen = tokens >= 2 and end > start
    return Steps(
        inputs, prefill, (end - start) / tokens if seen else None, float(np.mean(contexts))
    )


def profile(
    endpoint: Endpoint,
    settings: Sequence[Setting],
    path: Path | str,
    *,
    repeats: int = 3,
    warm_up: int = 1,
    limits: ProfileLimits | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    kept_for: KeptFor = "fit",
    after: Profile | None = None,
) -> Profile:
    """Measure every setting so many times, in random order, and keep each round as it ends.

    Never more requests are under way than the batch of one setting, none is sent twice, and a
    file that holds some of the rounds already is gone on with.

    Parameters
    ----------
    path
        CSV file; created, or continued where it holds rounds of the same model.
    warm_up
        Rounds of the largest setting that are not kept.
    progress
        Called with a line after each round.
    kept_for
        What the rounds are marked for in the file; those of a check are in no fit.
    after
        A profile whose time and tokens count against the same limits.

    Raises
    ------
    EndpointError
        If the server fails; rounds that ended stay in the file.
    DataError
        If the file is no profile, or of another model.
    """
    require(
        len(settings) > 0 and repeats >= 1 and warm_up >= 0,
        f"A profile of {len(settings)} settings, {repeats} repeats and {warm_up} rounds of "
        "warm-up measures nothing.",
        resolve="give at least one setting and one repeat.",
    )
    file = Path(path)
    have = _rounds(file, endpoint.model, kept_for)
    rounds = [(setting, k) for setting in dict.fromkeys(settings) for k in range(repeats)]
    order = stream(seed, "order").permutation(len(rounds))
    missing = [rounds[i] for i in order if _key(*rounds[i]) not in have]
    stopped, sent = "", 0
    start_s, say = time.perf_counter() - (after.seconds if after else 0.0), progress or _silent
    tokens = after.tokens if after else 0.0
    if missing:
        work = _Work(
            endpoint, file, limits or ProfileLimits(), seed, say, kept_for, tokens, start_s
        )
        # A server that fails leaves the rounds that ended.
        stopped, sent = asyncio.run(work.run(missing, max(settings), warm_up, len(rounds)))
        tokens = work.tokens
    done, spent_s = len(rounds) - len(missing) + sent, time.perf_counter() - start_s
    return Profile(file, done, len(rounds), sent, stopped, spent_s, tokens)


def _silent(_: str) -> None:
    """Say nothing of a round."""


@dataclass(slots=True)
class _Work:
    endpoint: Endpoint
    file: Path
    limits: ProfileLimits
    seed: int
    say: Callable[[str], None]
    kept_for: KeptFor
    tokens: float
    start_s: float
    ignore_eos: bool = True
    seconds_per_token: float = 0.0

    async def run(
        self, missing: list[tuple[Setting, int]], largest: Setting, warm_up: int, planned: int
    ) -> tuple[str, int]:
        prompts, done = Prompts(), planned - len(missing)
        async with self.endpoint.client() as client:
            counts = []
            for words in _PROBES:
                reply = await self._probe(client, prompts.words(words, stream(self.seed, "probe")))
                counts.append((words, reply.input_tokens))
                self.tokens += reply.input_tokens + reply.output_tokens
            prompts.learn(counts)
            for k in range(warm_up):
                if reason := self._over(largest):
                    return reason, 0
                await self._round(client, prompts, largest, -1 - k)
            for sent, (setting, k) in enumerate(missing):
                if reason := self._over(setting):
                    return f"{reason} {len(missing) - sent} rounds are missing.", sent
                found = await self._round(client, prompts, setting, k)
                _append(self.file, _lines(setting, k, found, self.endpoint.model, self.kept_for))
                self.say(
                    f"{done + sent + 1}/{planned} batch {setting.batch}, "
                    f"{found.input_tokens:.0f} input tokens: prefill {1e3 * found.prefill_s:.1f} ms"
                )
        return "", len(missing)

    async def _probe(self, client: AsyncOpenAI, prompt: str) -> Reply:
        try:
            return await self.endpoint.complete(client, prompt, 2, ignore_eos=self.ignore_eos)
        except EndpointError as error:
            if not self.ignore_eos or error.status not in _REFUSED:
                raise
            self.ignore_eos = False
            return await self._probe(client, prompt)

    async def _round(
        self, client: AsyncOpenAI, prompts: Prompts, setting: Setting, repeat: int
    ) -> Steps:
        rng = stream(self.seed, f"{setting}/{repeat}/{self.kept_for}")
        texts = [prompts.of_tokens(setting.input_tokens, rng) for _ in range(setting.batch)]
        begin = time.perf_counter()
        refused: ExceptionGroup[EndpointError] | None = None
        try:
            async with asyncio.TaskGroup() as group:  # the first failure ends the others
                asked = [
                    group.create_task(
                        self.endpoint.complete(
                            client, text, setting.output_tokens, ignore_eos=self.ignore_eos
                        )
                    )
                    for text in texts
                ]
        except* EndpointError as failed:
            refused = failed
        if refused is not None:
            raise refused.exceptions[0]
        replies = [task.result() for task in asked]
        used = sum(reply.input_tokens + reply.output_tokens for reply in replies)
        self.tokens += used
        self.seconds_per_token = max(
            self.seconds_per_token, (time.perf_counter() - begin) / max(used, 1)
        )
        return steps(replies)

    def _over(self, setting: Setting) -> str:
        """Which limit the next round would break, empty if none."""
        if self.tokens + setting.tokens > self.limits.tokens:
            return f"The limit of {self.limits.tokens:g} tokens is reached."
        spent = time.perf_counter() - self.start_s
        if spent + self.seconds_per_token * setting.tokens > self.limits.seconds:
            return f"The limit of {self.limits.seconds:g} s is reached."
        return ""


def _key(setting: Setting, repeat: int) -> tuple[int, int, int, int]:
    return setting.batch, setting.input_tokens, setting.output_tokens, repeat


def _lines(setting: Setting, repeat: int, found: Steps, model: str, kept_for: KeptFor) -> str:
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    asked = (repeat, setting.input_tokens, setting.output_tokens, model, kept_for)
    # The decode row first: a round counts as kept once its prefill row stands.
    if found.decode_s is not None:
        context = f"{found.context_tokens:.6g}"
        write(["decode", setting.batch, "", context, f"{found.decode_s:.6g}", *asked])
    inputs = f"{found.input_tokens:.6g}"
    write(["prefill", setting.batch, inputs, "", f"{found.prefill_s:.6g}", *asked])
    return text.getvalue()


def _append(file: Path, lines: str) -> None:
    with file.open("a", encoding="utf-8", newline="") as out:
        if file.stat().st_size == 0:
            out.write(",".join(COLUMNS) + "\n")
        out.write(lines)
        out.flush()
        os.fsync(out.fileno())


def _rounds(file: Path, model: str, kept_for: KeptFor) -> set[tuple[int, int, int, int]]:
    """Rounds of a kind that a file holds; what a crash left half-written is cut off."""
    if not file.exists():
        check_new(file)
        return set()
    text = file.read_text(encoding="utf-8")
    if not text:
        return set()
    head, _, body = text.partition("\n")
    if tuple(head.split(",")) == COLUMNS[:-1]:  # from before there were checks
        body = body.replace("\n", ",fit\n")
        head = ",".join(COLUMNS)
        _rewrite(file, f"{head}\n{body}")
    if tuple(head.split(",")) != COLUMNS:
        raise DataError(
            "holds something else than a profile.",
            path=file,
            resolve="choose another name for the measurements.",
        )
    kept: list[str] = []
    pending: list[str] = []
    found: set[tuple[int, int, int, int]] = set()
    for line in body.splitlines(keepends=True):
        pending.append(line)
        row = next(csv.reader([line]), [])
        if not line.endswith("\n") or len(row) != len(COLUMNS) or row[0] != "prefill":
            continue
        if row[8] != model:
            raise DataError(
                f"holds a profile of '{row[8]}', not of '{model}'.",
                path=file,
                resolve="choose another file for this model.",
            )
        if row[9] == kept_for:
            found.add((int(row[1]), int(row[6]), int(row[7]), int(row[5])))
        kept += pending
        pending = []
    if pending:
        _rewrite(file, "".join([head, "\n", *kept]))
    return found


def _rewrite(file: Path, text: str) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
