"""The trace: when requests arrive, and how many tokens go in and come out."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from hetero.arrays import Floats
from hetero.display import Shown, Table
from hetero.errors import (
    ParameterError,
    require,
    require_not_negative,
    require_positive,
    require_share,
)
from hetero.files import writing
from hetero.workload import statistics
from hetero.workload.statistics import Description

Ints = NDArray[np.int32]
LongInts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace(Shown):
    """Requests in the order of their arrival; validated once, immutable.

    A request has at least one input token. An output of zero tokens is allowed: dispatchers get
    such requests (a prompt that is only scored, or a cancelled one), and they still cost a prefill.

    Attributes
    ----------
    arrival_s
        Shape (n,), float64, not decreasing, >= 0; time of arrival [s].
    input_tokens, output_tokens
        Shape (n,), int32; prompt length >= 1 and generated length >= 0 [tokens].
    name
        What the trace is, such as ``"azure2023_conv"``.
    source
        Where it comes from: ``"real:<file>"`` (published), ``"file:<file>"`` (a user's own),
        ``"twin:<name>, seed 0"`` or ``"synthetic"``.
    prefix_offsets, prefix_ids
        Shapes (n + 1,) and (prefix_offsets[-1],), int64; request ``i`` starts with the blocks
        ``prefix_ids[prefix_offsets[i]:prefix_offsets[i + 1]]``. Equal ids are equal text.
    block_tokens
        Tokens per prefix block; 0 without prefix blocks.
    session_ids
        Shape (n,), int64; requests of one conversation share an id.
    priorities
        Shape (n,), int32, 0 to 32,767; smaller ones are served first, see
        :meth:`with_priorities`. Without them all are equal.
    clients, think_s
        Of a closed loop, see :meth:`closed_loop`; 0 where ``arrival_s`` says when requests come.

    Examples
    --------
    >>> trace = Trace([0.0, 0.5, 2.0], [100, 20, 300], [10, 5, 0], name="three")
    >>> len(trace), trace.describe().rate_rps
    (3, 1.0)
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    name: str = "trace"
    source: str = ""
    prefix_offsets: LongInts | None = None
    prefix_ids: LongInts | None = None
    block_tokens: int = 0
    session_ids: LongInts | None = None
    priorities: Ints | None = None
    clients: int = 0
    think_s: float = 0.0

    def __post_init__(self) -> None:
        arrival = _column(self.arrival_s, np.float64, "arrival_s")
        count = len(arrival)
        if count == 0:
            raise ParameterError(
                "A trace needs at least one request; received none.",
                resolve="widen the filter or window, or pass requests.",
            )
        _require("arrival_s", arrival, np.isfinite(arrival) & (arrival >= 0), "finite and >= 0 s")
        sorted_ = np.concatenate([[True], np.diff(arrival) >= 0])
        _require("arrival_s", arrival, sorted_, "not before the one above; sort the requests")
        self._set("arrival_s", arrival)
        for field, lowest in (("input_tokens", 1), ("output_tokens", 0)):
            tokens = _column(getattr(self, field), np.int32, field)
            _require_length(field, tokens, count)
            _require(field, tokens, tokens >= lowest, f"at least {lowest} token")
            self._set(field, tokens)
        if self.session_ids is not None:
            sessions = _column(self.session_ids, np.int64, "session_ids")
            _require_length("session_ids", sessions, count)
            self._set("session_ids", sessions)
        if self.priorities is not None:
            classes = _column(self.priorities, np.int32, "priorities")
            _require_length("priorities", classes, count)
            _require("priorities", classes, (classes >= 0) & (classes < 2**15), "0 to 32,767")
            self._set("priorities", classes)
        self._check_prefixes(count)
        require_not_negative(clients=self.clients, think_s=self.think_s)
        require(
            arrival[-1] == 0 if self.clients else self.think_s == 0,
            f"{self.clients} clients that think for {self.think_s} s cannot send requests at "
            f"{arrival[0]} to {arrival[-1]} s.",
            resolve="make a closed loop of any trace with its closed_loop(clients, think_s).",
        )

    def _set(self, field: str, array: NDArray[np.generic]) -> None:
        array.setflags(write=False)
        object.__setattr__(self, field, array)

    def _check_prefixes(self, count: int) -> None:
        given = (
            self.prefix_offsets is not None,
            self.prefix_ids is not None,
            self.block_tokens > 0,
        )
        if any(given) != all(given):
            raise ParameterError(
                "Prefix blocks need prefix_offsets, prefix_ids and block_tokens; received "
                f"{sum(given)} of the three.",
                resolve="pass all three or none.",
            )
        if self.prefix_offsets is None or self.prefix_ids is None:
            return
        offsets = _column(self.prefix_offsets, np.int64, "prefix_offsets")
        ids = _column(self.prefix_ids, np.int64, "prefix_ids")
        _require_length("prefix_offsets", offsets, count + 1)
        good = np.concatenate([[offsets[0] == 0], np.diff(offsets) >= 0])
        good[-1] &= offsets[-1] == len(ids)
        _require("prefix_offsets", offsets, good, f"rising from 0 to the {len(ids)} ids")
        self._set("prefix_offsets", offsets)
        self._set("prefix_ids", ids)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[tuple[float, int, int]]:
        """Requests one by one as (arrival_s, input_tokens, output_tokens)."""
        return zip(
            self.arrival_s.tolist(),
            self.input_tokens.tolist(),
            self.output_tokens.tolist(),
            strict=True,
        )

    def describe(self) -> Description:
        """Quantiles, correlation, rate and burstiness, as a table that shows itself."""
        return statistics.describe(self)

    def table(self) -> Table:
        """The description of the trace."""
        return self.describe().table()

    @property
    def own_bursts(self) -> bool:
        """Whether it is a user's file that says when requests came, more than one moment."""
        return self.source.startswith("file:") and bool(self.arrival_s[-1] > self.arrival_s[0])

    # Which requests -------------------------------------------------------------------------

    def take(self, index: ArrayLike) -> Trace:
        """Requests by position (or mask), in the order given; arrivals must stay in order."""
        chosen = np.arange(len(self))[np.asarray(index)]
        prefix_offsets, prefix_ids = self.prefix_offsets, self.prefix_ids
        if prefix_offsets is not None and prefix_ids is not None:
            lengths = np.diff(prefix_offsets)[chosen]
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            shift = np.repeat(prefix_offsets[:-1][chosen] - offsets[:-1], lengths)
            prefix_ids = prefix_ids[np.arange(offsets[-1]) + shift]
            prefix_offsets = offsets
        return replace(
            self,
            arrival_s=self.arrival_s[chosen],
            input_tokens=self.input_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            prefix_offsets=prefix_offsets,
            prefix_ids=prefix_ids,
            session_ids=None if self.session_ids is None else self.session_ids[chosen],
            priorities=None if self.priorities is None else self.priorities[chosen],
        )

    def filter(
        self,
        *,
        input_tokens: tuple[int, int] | None = None,
        output_tokens: tuple[int, int] | None = None,
    ) -> Trace:
        """Requests whose lengths lie within the given bounds, both ends included.

        Helix (section 6.2) prints the rule input <= 2048 and output <= 1024, which keeps 16,663
        requests of the conversation trace; with input >= 4 it keeps the 16,657 that it reports.

        Examples
        --------
        >>> trace = Trace([0, 0, 0], [2, 2048, 4096], [5, 1024, 5])
        >>> len(trace.filter(input_tokens=(4, 2048), output_tokens=(0, 1024)))
        1
        """
        keep = np.ones(len(self), dtype=np.bool_)
        for tokens, bounds in (
            (self.input_tokens, input_tokens),
            (self.output_tokens, output_tokens),
        ):
            if bounds is not None:
                keep &= (tokens >= bounds[0]) & (tokens <= bounds[1])
        if not keep.any():
            raise ParameterError(
                f"No request of {self.name} has input in {input_tokens} and output in "
                f"{output_tokens} tokens; inputs are {self.input_tokens.min()} to "
                f"{self.input_tokens.max()}, outputs {self.output_tokens.min()} to "
                f"{self.output_tokens.max()}.",
                resolve="widen the bounds.",
            )
        return self.take(keep)

    def head(self, count: int) -> Trace:
        """The first ``count`` requests (all, if there are fewer)."""
        require_positive(count=count)
        return self.take(np.arange(min(count, len(self))))

    def window(self, start_s: float, end_s: float) -> Trace:
        """Requests that arrive in [start_s, end_s), their clock starting at ``start_s``."""
        keep = (self.arrival_s >= start_s) & (self.arrival_s < end_s)
        if not keep.any():
            raise ParameterError(
                f"No request of {self.name} arrives from {start_s} to {end_s} s; it spans "
                f"{self.arrival_s[0]:.6g} to {self.arrival_s[-1]:.6g} s.",
                resolve="choose a window within the trace.",
            )
        part = self.take(keep)
        return replace(part, arrival_s=part.arrival_s - start_s)

    def with_prefix(self, share: float, block_tokens: int = 16) -> Trace:
        """The same requests, each of which begins like all others, by a share of its prompt.

        A prefix cache finds about that share of all prompt tokens, as with a system prompt.

        Parameters
        ----------
        share
            Of every prompt, rounded down to whole blocks.

        Examples
        --------
        >>> shared = Trace([0.0, 1.0], [80, 40], [5, 5]).with_prefix(0.5)
        >>> shared.prefix_ids.tolist(), shared.prefix_offsets.tolist()
        ([0, 1, 0], [0, 2, 3])
        """
        require_share(share=share)
        blocks = np.floor(share * self.input_tokens / block_tokens).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(blocks)])
        ids = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks)
        return replace(self, prefix_offsets=offsets, prefix_ids=ids, block_tokens=block_tokens)

    def with_priorities(self, shares: ArrayLike, rng: np.random.Generator) -> Trace:
        """The same requests in classes of these shares, of which the first is served first.

        Engines that are told so (``--scheduling-policy priority`` of vLLM) admit what waits in
        order of its class and then of its arrival, and evict from the last class first; what
        waits at the dispatcher is sent in that order too. Requests of a session are of one class.

        Examples
        --------
        >>> three = Trace([0.0, 1.0, 2.0], [80, 40, 9], [5, 5, 5], session_ids=[7, 8, 7])
        >>> three.with_priorities([0.5, 0.5], np.random.default_rng(0)).priorities.tolist()
        [1, 0, 1]
        """
        shares = np.asarray(shares, np.float64)
        require(
            bool((shares > 0).all()) and abs(shares.sum() - 1.0) < 1e-9,
            f"Shares of {shares.tolist()} are no shares of all requests.",
            resolve="give shares above 0 that sum to 1.",
        )
        own = self.session_ids if self.session_ids is not None else np.arange(len(self))
        sessions, which = np.unique(own, return_inverse=True)
        drawn = np.searchsorted(np.cumsum(shares)[:-1], rng.random(len(sessions)), "right")
        return replace(self, priorities=drawn[which].astype(np.int32))

    def sample(self, count: int, rng: np.random.Generator) -> Trace:
        """``count`` requests drawn without replacement, in the order of their arrival."""
        if not 1 <= count <= len(self):
            raise ParameterError(
                f"{count} requests cannot be drawn without replacement from {len(self)}.",
                resolve=f"choose between 1 and {len(self)}.",
            )
        return self.take(np.sort(rng.choice(len(self), size=count, replace=False)))

    def reordered(self, order: ArrayLike) -> Trace:
        """Requests by position in any order, each as long after the one before it as it came.

        The first of the trace comes a mean gap after the one before it.

        Examples
        --------
        >>> three = Trace([0.0, 1.0, 4.0], [80, 40, 9], [5, 5, 5])
        >>> three.reordered([1, 2, 0, 1]).arrival_s.tolist()
        [0.0, 3.0, 5.0, 6.0]
        """
        gap_s = np.diff(self.arrival_s, prepend=self.arrival_s[0])
        gap_s[0] = (self.arrival_s[-1] - self.arrival_s[0]) / max(len(self) - 1, 1)
        at = np.asarray(order, np.int64)
        came_s = np.cumsum(gap_s[at])
        taken = self.all_at_once().take(at)
        return taken._arriving(came_s - came_s[0], self.clients, self.think_s)

    def duplicate(self, copies: int) -> Trace:
        """Every request ``copies`` times in a row: r1, .., r1, r2, .., r2 (Xiong, section 5.1).

        Dealt out in rotation to ``copies`` (or a divisor of it) instances, each instance gets the
        same work. Copies arrive together with their original.
        """
        require_positive(copies=copies)
        return self.take(np.repeat(np.arange(len(self)), copies))

    # When they arrive -----------------------------------------------------------------------

    def rescale(self, *, rate_rps: float) -> Trace:
        """The same bursts at another mean rate: all gaps shrink or grow by one factor."""
        now = statistics.rate_rps(self.arrival_s)
        if not np.isfinite(now):
            raise ParameterError(
                f"All requests of {self.name} arrive at once, so no factor gives them a rate.",
                resolve="use poisson(rate_rps, rng).",
            )
        first = self.arrival_s[0]
        require_positive(rate_rps=rate_rps)
        return self._arriving(first + (self.arrival_s - first) * (now / rate_rps))

    def poisson(self, rate_rps: float, rng: np.random.Generator) -> Trace:
        """The same requests in the same order with Poisson arrivals at ``rate_rps``."""
        require_positive(rate_rps=rate_rps)
        gaps = rng.exponential(1.0 / rate_rps, size=len(self))
        return self._arriving(np.cumsum(gaps))

    def all_at_once(self) -> Trace:
        """The same requests at an infinite rate: all arrive at time 0 (offline serving)."""
        return self._arriving(np.zeros(len(self)))

    def closed_loop(self, clients: int, think_s: float = 0.0) -> Trace:
        """The same requests in the same order, sent by clients that each wait for an answer.

        Every client sends a request at time 0, and the next that nobody has sent a time to think
        after its last was answered or refused, as benchmarks of a given concurrency do: at most
        ``clients`` requests are in flight. When they came is in the trace of the run.

        Examples
        --------
        >>> three = Trace([0.0, 0.5, 2.0], [100, 20, 300], [10, 5, 0]).closed_loop(2)
        >>> three.clients, three.arrival_s.tolist()
        (2, [0.0, 0.0, 0.0])
        """
        require_positive(clients=clients)
        return self._arriving(np.zeros(len(self)), clients, think_s)

    def _arriving(self, arrival_s: Floats, clients: int = 0, think_s: float = 0.0) -> Trace:
        return replace(self, arrival_s=arrival_s, clients=clients, think_s=think_s)

    # In and out -----------------------------------------------------------------------------

    def to_frame(self) -> pd.DataFrame:
        """One row per request; ``prefix_ids`` is a list per request where there are blocks."""
        frame = pd.DataFrame(
            {
                "arrival_s": self.arrival_s,
                "input_tokens": self.input_tokens,
                "output_tokens": self.output_tokens,
            }
        )
        if self.session_ids is not None:
            frame["session_id"] = self.session_ids
        if self.priorities is not None:
            frame["priority"] = self.priorities
        if self.prefix_offsets is not None and self.prefix_ids is not None:
            frame["block_tokens"] = self.block_tokens
            frame["prefix_ids"] = pd.Series(
                [part.tolist() for part in np.split(self.prefix_ids, self.prefix_offsets[1:-1])],
                dtype=object,
            )
        return frame

    def to_csv(self, path: Path | str, *, force: bool = False) -> None:
        """Write one row per request (``.gz`` compresses); prefix ids stand space-separated."""
        frame = self.to_frame()
        if "prefix_ids" in frame:
            frame["prefix_ids"] = [" ".join(map(str, part)) for part in frame["prefix_ids"]]
        text = frame.to_csv(index=False, lineterminator="\n").encode()
        with writing(path, force=force) as part:
            # Without a time and name inside, the same trace gives the same bytes.
            part.write_bytes(gzip.compress(text, mtime=0) if part.suffix == ".gz" else text)

    def to_parquet(self, path: Path | str, *, force: bool = False) -> None:
        """Write one row per request as Parquet."""
        with writing(path, force=force) as part:
            self.to_frame().to_parquet(part, index=False)


def _column(values: ArrayLike, dtype: type[np.generic], field: str) -> NDArray[Any]:
    """Copy of one column in its type; fractions and overflow in whole-number columns raise."""
    raw = np.asarray(values)
    if raw.ndim != 1:
        raise ParameterError(
            f"{field} needs one value per request; received shape {raw.shape}.",
            resolve="pass a one-dimensional sequence.",
        )
    if raw.size and not (np.issubdtype(raw.dtype, np.number) or raw.dtype == object):
        raise ParameterError(
            f"{field} needs numbers; received values such as {raw[0]!r}.",
            resolve="read files with hetero.workload.readers.",
        )
    if np.issubdtype(dtype, np.integer) and raw.size:
        limits = np.iinfo(np.int32 if dtype is np.int32 else np.int64)
        # Integers as they are: floats would round those above 2^53.
        numbers = raw if np.issubdtype(raw.dtype, np.integer) else raw.astype(np.float64)
        whole = np.isfinite(numbers) & (numbers == np.floor(numbers))
        _require(field, raw, whole, "a whole number")
        _require(
            field, raw, (numbers >= limits.min) & (numbers <= limits.max), f"at most {limits.max}"
        )
    return np.array(raw, dtype=dtype)


def _require(field: str, values: NDArray[Any], good: NDArray[np.bool_], rule: str) -> None:
    if good.all():
        return
    row = int(np.argmin(good))
    raise ParameterError(
        f"{field} of request {row + 1} is {values[row].item()!r}; it must be {rule}.",
        resolve="correct or drop the request; readers name file, line and column.",
    )


def _require_length(field: str, values: NDArray[np.generic], count: int) -> None:
    require(
        len(values) == count,
        f"{field} has {len(values)} values where {count} belong.",
        resolve="pass columns of equal length.",
    )
