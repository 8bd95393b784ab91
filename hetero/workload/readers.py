"""Readers of trace and benchmark files; a bad row ends in an error that names its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.errors import DataError, ParameterError
from hetero.rows import Rows, listed, read_rows
from hetero.workload.statistics import rate_rps
from hetero.workload.trace import Trace

#: Mean rates [requests/s] outside these bounds are taken for a wrong unit of time.
PLAUSIBLE_RPS = (1 / 60, 1000.0)
#: Prompt tokens per second above this are too, where a file does not say its unit.
PLAUSIBLE_TPS = 5e5
#: Traces shorter than this say nothing on the unit of time.
PLAUSIBLE_REQUESTS = 10

#: Tokens per prefix block of the Mooncake traces, as their description states.
MOONCAKE_BLOCK_TOKENS = 512

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns", "datetime"]
"""What the arrival column counts; ``datetime`` is text such as 2023-11-16 18:17:03.97."""

_PER_SECOND: dict[str, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_INT32 = np.iinfo(np.int32).max

_Prefixes = tuple[NDArray[np.int64], NDArray[np.int64], int]  # offsets, ids, tokens per block


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A kind of file, by what it calls the parts of a request.

    Attributes
    ----------
    arrival, input, output, session
        Its columns; without ``arrival`` all requests arrive at once.
    unit
        What arrivals count; empty where they and their rate tell it (s or ms).
    ttft, e2e
        Columns of the times to first and last token, and their unit; with ``since`` they are
        moments, as arrivals are.
    failed
        Columns of requests to leave out, with what is then in them (a regular expression).
    tool
        Name of the benchmark that writes it, in the order in which requests end, from any moment.
    """

    arrival: str | None = None
    input: str = "input_tokens"
    output: str = "output_tokens"
    session: str | None = None
    unit: str = "s"
    ttft: tuple[str, str] = ("ttft_s", "s")
    e2e: tuple[str, str] = ("e2e_s", "s")
    since: bool = False
    failed: tuple[tuple[str, str], ...] = ()
    block: int = 0
    rebase: bool = False
    tool: str = ""

    @property
    def marks(self) -> set[str]:
        """Columns by which it is known."""
        ends = {self.e2e[0]} if self.tool and self.arrival else set()
        return {self.arrival or self.output, self.input} | ends


_AI = "metrics.{}_sequence_length.value".format
_VLLM = FileLayout(
    *("start_times", "input_lens", "output_lens"),
    ttft=("ttfts", "s"),
    e2e=("e2els", "s"),
    failed=(("errors", ".+"),),
    tool="vllm bench serve",
)
_LLM = FileLayout("start_time", "prompt_tokens", tool="guidellm")
_TTFT, _FIRST, _LAST = ("time_to_first_token_ms", "ms"), ("first", "ns"), ("last", "ns")
LAYOUTS = (
    FileLayout("arrival_s"),
    FileLayout("TIMESTAMP", "ContextTokens", "GeneratedTokens", unit="datetime"),
    FileLayout("timestamp", "input_length", "output_length", unit=""),  # Mooncake
    _VLLM,
    replace(_VLLM, arrival=None, tool="sglang.bench_serving or an older vllm bench serve"),
    FileLayout(
        *("metadata.request_start_ns", _AI("input"), _AI("output")),
        unit="ns",
        ttft=("metrics.time_to_first_token.value", "ms"),
        e2e=("metrics.request_latency.value", "ms"),
        failed=(
            *(("error", ".+"), ("error.message", ".*")),
            *(("metadata.was_cancelled", "True"), ("metadata.benchmark_phase", "warmup")),
        ),
        tool="aiperf",
    ),
    replace(_LLM, ttft=("first_token_time", "s"), e2e=("end_time", "s"), since=True),
    replace(_LLM, arrival="request_start_time", ttft=_TTFT, e2e=("request_latency", "s")),
    replace(FileLayout("sent", unit="ns", tool="genai-perf"), ttft=_FIRST, e2e=_LAST, since=True),
    FileLayout(),
)
"""Files that are known by their columns, the first that fits."""
# Where they keep their requests: in lists of these paths, or in columns as lists.
_WITHIN = ("benchmarks.requests.successful", "experiments.requests", "input_lens")

_KEYS = ("arrival", "input", "output", "session", "unit", "block")
_WORDS = ("sort", "rebase", "skip-bad")


def read(
    path: Path | str,
    *,
    columns: str = "",
    sort: bool = False,
    plausible_rps: tuple[float, float] = PLAUSIBLE_RPS,
    name: str = "",
) -> Trace:
    """Trace of a file whose kind is told by its content, or by its named columns.

    Knows the traces of Azure (CSV) and Mooncake (JSON lines), what :class:`Trace` writes, lists of
    lengths (``input_tokens`` and ``output_tokens`` alone), and the requests that ``vllm bench
    serve``, ``sglang.bench_serving``, aiperf, guidellm and genai-perf write. Any file may be CSV,
    JSON or Parquet. Failed requests are left out, and counted in the trace's source.

    Parameters
    ----------
    columns
        Of a file that is of none of these kinds: ``arrival``, ``input``, ``output`` and ``session``
        with the names of their columns (in JSON the path of a field, as ``usage.prompt_tokens``),
        ``unit`` (:data:`TimeUnit`; by default seconds, or ``datetime`` where the first arrival is
        no number), ``block`` (tokens per id of ``hash_ids``), and the words ``sort`` (put requests
        in order), ``rebase`` (count arrivals from the first) and ``skip-bad`` (leave out bad rows,
        and count them in the trace's source), such as
        ``"arrival=ts,input=prompt,output=reply,unit=ms,sort"``.
    plausible_rps
        A mean rate outside these bounds [requests/s] is taken for a wrong unit.

    Raises
    ------
    DataError
        If the file cannot be read, is of another kind, or has a bad row.
    """
    known = _read_columns(columns)
    rows, layout = opened(path, known)
    sort = sort or "sort" in known or bool(layout.tool)
    return rows.made(
        lambda good: _trace(good, layout, sort=sort, plausible_rps=plausible_rps, name=name),
        skip_bad="skip-bad" in known,
    )


def opened(path: Path | str, known: Mapping[str, Any]) -> tuple[Rows, FileLayout]:
    """Rows of a file that did not fail, and what they are called where not ``known``.

    Raises
    ------
    DataError
        If the file cannot be read, is of an unknown kind or lacks a column.
    """
    rows = _with_times(read_rows(Path(path), within=_WITHIN, skip_bad="skip-bad" in known))
    names = {str(column) for column in rows.frame}
    layout = next((one for one in LAYOUTS if one.marks <= names), None)
    named = {key: known[key] for key in _KEYS if key in known}
    if layout is None and not {"arrival", "input", "output"} & named.keys():
        what = f"its columns {listed(names)} are of no known kind of trace."
        hint = "name its columns, as in --columns arrival=time,input=prompt,output=reply."
        if "request_throughput" in names:
            what = "it has a benchmark's summary and not its requests."
            hint = "run vllm bench serve with --save-detailed, sglang.bench_serving with "
            hint += "--output-details, or give aiperf's profile_export.jsonl."
        raise DataError(what, path=path, resolve=hint)
    layout = layout or FileLayout("arrival_s" if "arrival_s" in names else None)
    arrival = named.get("arrival", layout.arrival)
    if arrival is None and (of := {"unit", "session", "rebase"} & known.keys()):
        what = f"'{min(of)}' says something of arrivals, and no column of arrivals is named."
        raise ParameterError(what, resolve="name it too, as in --columns arrival=time,unit=ms.")
    used = (arrival, *(named.get(key, getattr(layout, key)) for key in _KEYS[1:4]))
    rows.need(column for column in used if column is not None)
    if "arrival" in named and "unit" not in named and arrival != layout.arrival:
        first = pd.to_numeric(rows.frame[arrival].head(1), errors="coerce")
        dates = pd.api.types.is_datetime64_any_dtype(rows.frame[arrival].dtype)
        named["unit"] = "datetime" if dates or first.isna().any() else "s"
    layout = replace(layout, **named, rebase="rebase" in known)
    failed = np.zeros(len(rows), dtype=bool)
    for column, said in layout.failed:
        if column in names:
            cells = rows.frame[column].where(rows.frame[column].notna(), "").astype(str)
            failed |= cells.str.fullmatch(said, flags=re.DOTALL).to_numpy(dtype=bool)
    return (rows.without(failed) if failed.any() else rows), layout


def benchmark(path: Path | str) -> str:
    """Name of the benchmark, or of ``hetero replay``, that wrote a file; empty if none did."""
    try:
        rows, layout = opened(path, {})
    except DataError as error:
        known = {"it is of genai-perf": "genai-perf", "a benchmark's summary": "a benchmark"}
        return next((tool for said, tool in known.items() if said in error.what), "")
    return layout.tool or "hetero replay" * ("ttft_s" in rows.frame)


def answered_frame(rows: Rows, layout: FileLayout) -> pd.DataFrame:
    """Requests of a benchmark in the columns of a simulated run.

    Raises
    ------
    DataError
        If the file has no arrivals or times, or a bad row.
    """
    if layout.arrival is None:
        what = f"what {layout.tool} writes here has no times at which requests were sent."
        hint = "run a release of vllm bench serve that writes start_times, or aiperf or guidellm."
        raise rows.error(what, None, None, hint)
    rows.need((layout.ttft[0], layout.e2e[0]))
    sent = _seconds(rows, layout.arrival, layout.unit)
    found = {"arrival_s": sent - sent.min()}
    for name, (column, unit) in (("ttft_s", layout.ttft), ("e2e_s", layout.e2e)):
        times = rows.numbers(column) / _PER_SECOND[unit]
        found[name] = times - sent if layout.since else times
    found["input_tokens"] = rows.whole(layout.input, 1)
    found["output_tokens"] = rows.whole(layout.output, 0)
    return pd.DataFrame(found)


def _with_times(rows: Rows) -> Rows:
    """The rows, with the times and lengths that some benchmarks leave to be worked out."""
    frame = rows.frame
    try:
        if {"ttfts", "itls"} <= {*frame} and "e2els" not in frame:
            frame = frame.assign(e2els=frame.ttfts + frame.itls.map(sum))
        if {"response_timestamps", "response_outputs"} <= {*frame}:
            frame = frame[frame.response_timestamps.map(len) > 0]
            usage = frame.response_outputs.astype(str)
            frame = frame.assign(
                sent=frame.timestamp,
                first=frame.response_timestamps.str[0],
                last=frame.response_timestamps.str[-1],
                input_tokens=usage.str.extract(r"prompt_tokens\W+(\d+)")[0],
                output_tokens=usage.str.extract(r"completion_tokens\W+(\d+)")[0],
            )
    except (TypeError, ValueError, AttributeError, OverflowError):
        what = "its times of tokens are no lists of numbers."
        raise rows.error(what, None, None, "give the file as the benchmark wrote it.") from None
    if "first" in frame and frame.input_tokens.isna().any():
        what = "it is of genai-perf, and its responses do not say how many tokens they have."
        hint = (
            'run it with --extra-inputs \'{"stream_options": {"include_usage": true}}\', or give '
        )
        hint += "the profile_export.jsonl of aiperf, its successor."
        raise rows.error(what, None, None, hint)
    return replace(rows, frame=frame, left_out=rows.left_out + len(rows) - len(frame))


def _read_columns(columns: str) -> dict[str, Any]:
    """What a text names, see :func:`read`."""
    known: dict[str, Any] = {}
    for part in columns.split(",") if columns else ():
        key, _, value = (each.strip() for each in part.partition("="))
        good = value == "" if key in _WORDS else key in _KEYS and value != ""
        good &= key != "block" or re.fullmatch(r"[1-9]\d{0,8}", value) is not None
        if not good or key in known:
            raise ParameterError(
                f"The columns cannot be read at '{part.strip()}'.",
                resolve=f"write each of {', '.join(_KEYS)} at most once with a value, and the "
                f"words {', '.join(_WORDS)}, as in arrival=time,input=prompt,output=reply.",
            )
        known[key] = int(value) if key == "block" else value
    units = get_args(TimeUnit)
    if known.get("unit") not in (None, *units):
        what = f"'{known['unit']}' is no unit of time."
        raise ParameterError(what, resolve=f"use {', '.join(units)}.")
    return known


def _trace(
    rows: Rows, layout: FileLayout, *, sort: bool, plausible_rps: tuple[float, float], name: str
) -> Trace:
    count = len(rows)
    if count == 0:
        raise DataError("it has no requests.", path=rows.path, resolve="pass a file with rows.")
    inputs = rows.whole(layout.input, 1, _INT32).astype(np.int32)
    offsets, ids, block_tokens = _prefixes(rows, inputs, layout.block) or (None, None, 0)
    session = layout.session or ("session_id" if "session_id" in rows.frame else None)
    arrival, unit = layout.arrival, layout.unit
    seen = [f"file:{rows.path.name}"]
    if arrival is not None and not unit:
        unit = _told_unit(rows, arrival, inputs, plausible_rps)
        seen += ["times in s"] * (unit == "s")
    if "hash_ids" in rows.frame and block_tokens != MOONCAKE_BLOCK_TOKENS:
        seen.append(f"blocks of {block_tokens} tokens")
    if rows.left_out:
        seen.append(f"{rows.left_out:,} of {rows.left_out + count:,} left out")
    trace = Trace(
        arrival_s=np.zeros(count),
        input_tokens=inputs,
        output_tokens=rows.whole(layout.output, 0, _INT32).astype(np.int32),
        name=name or rows.path.name.split(".")[0],
        source=", ".join(seen),
        prefix_offsets=offsets,
        prefix_ids=ids,
        block_tokens=block_tokens,
        session_ids=None if session is None else rows.labels(session),
        priorities=rows.whole("priority", 0, 2**15 - 1).astype(np.int32)
        if "priority" in rows.frame
        else None,
    )
    if arrival is None:
        return trace
    arrival_s = _seconds(rows, arrival, unit)
    if layout.rebase or layout.tool or unit == "datetime":
        arrival_s = arrival_s - arrival_s.min()
    late = np.diff(arrival_s) < 0
    if late.any() and not sort:
        row = int(np.argmax(late))
        raise rows.error(
            f"this request arrives {arrival_s[row] - arrival_s[row + 1]:.6g} s before the one "
            "above.",
            row + 1,
            arrival,
            "sort the file, or pass sort=True (--columns sort).",
        )
    if late.any():
        order = np.argsort(arrival_s, kind="stable")
        trace, arrival_s = trace.take(order), arrival_s[order]
    _check_span(rows, arrival, arrival_s, unit, plausible_rps)
    return replace(trace, arrival_s=arrival_s)


def _told_unit(
    rows: Rows, column: str, inputs: NDArray[np.int32], plausible_rps: tuple[float, float]
) -> str:
    """Seconds or milliseconds, by the rates that either would give and by fractions."""
    at = rows.numbers(column)
    rates = {unit: rate_rps(np.sort(at)) * _PER_SECOND[unit] for unit in ("ms", "s")}
    whole = bool((at == np.floor(at)).all())
    if len(at) < PLAUSIBLE_REQUESTS or not np.isfinite(rates["s"]):
        return "ms" if whole else "s"
    low, high = plausible_rps[0], min(plausible_rps[1], PLAUSIBLE_TPS / float(inputs.mean()))
    good = [unit for unit, rate in rates.items() if low <= rate <= high]
    # Those who count milliseconds write whole numbers, as the Mooncake traces are described.
    if good == (["s"] if whole else ["ms", "s"]):
        what = f"{len(at):,} requests of {inputs.mean():,.0f} tokens are {rates['s']:.3g} "
        what += f"requests/s if these are seconds, and {rates['ms']:.3g} if milliseconds."
        raise rows.error(what, None, column, "say which, with --columns unit=s or unit=ms.")
    return good[0] if good else "ms" if whole else "s"


def _seconds(rows: Rows, column: str, unit: str) -> NDArray[np.float64]:
    """Arrivals of a column in seconds; dates count from the earliest."""
    if unit != "datetime":
        found = rows.numbers(column)
        what = "a time of arrival (it is negative)"
        rule = "count arrivals from a moment before the first request."
        rows.refuse(found < 0, column, what, rule)
        return found / _PER_SECOND[unit]
    # Stamps with and without a fraction of a second may alternate in one file.
    stamps = pd.to_datetime(rows.frame[column], errors="coerce", utc=True, format="ISO8601")
    rule = "write dates as 2023-11-16 18:17:03.97, or name their unit (--columns unit=...)."
    rows.refuse(stamps.isna().to_numpy(), column, "a date and time", rule)
    ticks = stamps.astype("datetime64[ns, UTC]").astype("int64").to_numpy()
    return np.asarray((ticks - ticks.min()) / 1e9)


def _check_span(
    rows: Rows,
    column: str,
    arrival_s: NDArray[np.float64],
    unit: str,
    plausible_rps: tuple[float, float],
) -> None:
    rate = rate_rps(arrival_s)
    if len(arrival_s) >= PLAUSIBLE_REQUESTS and np.isfinite(rate):
        low, high = plausible_rps
        if not low <= rate <= high:
            raise rows.error(
                f"{len(arrival_s):,} requests over {arrival_s[-1] - arrival_s[0]:.4g} s are "
                f"{rate:.3g} requests/s, so the unit '{unit}' seems wrong for values up to "
                f"{arrival_s[-1] * _PER_SECOND.get(unit, 1.0):.10g}.",
                len(arrival_s) - 1,
                column,
                f"name the right unit (--columns unit=...), or in Python pass plausible_rps if "
                f"{rate:.3g} requests/s are meant.",
            )
    if arrival_s[0] > 1e8:  # three years: counted from 1970, not from a start
        raise rows.error(
            f"the first request arrives after {arrival_s[0]:.4g} s, as if counted from 1970.",
            0,
            column,
            "use --columns rebase to count from the first request.",
        )


def _prefixes(rows: Rows, inputs: NDArray[np.int32], block_tokens: int) -> _Prefixes | None:
    """Offsets and ids of the prefix blocks: lists, or text with spaces between the ids."""
    column = next((one for one in ("prefix_ids", "hash_ids") if one in rows.frame), "")
    if not column:
        return None
    lists: list[list[int]] = []
    bad = np.zeros(len(rows), dtype=bool)
    for row, value in enumerate(rows.frame[column]):
        try:
            blocks = value.split() if isinstance(value, str) else value
            lists.append([int(block) for block in blocks])
            np.array(lists[-1], dtype=np.int64)
        except (ValueError, TypeError, OverflowError):
            bad[row] = True
    rule = "give every request a list of whole numbers (in CSV separated by spaces)."
    rows.refuse(bad, column, "a list of block ids", rule)
    counts = np.array([len(blocks) for blocks in lists], dtype=np.int64)
    if column == "hash_ids":
        block_tokens = block_tokens or _block_tokens(rows, inputs, counts)
    elif "block_tokens" in rows.frame:
        block_tokens = int(rows.whole("block_tokens", 1, _INT32)[0])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ids = np.asarray([block for blocks in lists for block in blocks], dtype=np.int64)
    return offsets.astype(np.int64), ids, block_tokens


def _block_tokens(rows: Rows, inputs: NDArray[np.int32], counts: NDArray[np.int64]) -> int:
    """Tokens per block: 512 as in Mooncake, or what fits the prompts, whole or begun blocks."""
    most = float(np.min(inputs[counts > 1] / (counts[counts > 1] - 1), initial=np.inf))
    if most > MOONCAKE_BLOCK_TOKENS:
        return MOONCAKE_BLOCK_TOKENS
    least = float(np.max(inputs[counts > 0] / (counts[counts > 0] + 1), initial=0.0))
    powers = [1 << k for k in range(9) if least < 1 << k < most]
    if len(powers) == 1:
        return powers[0]
    row = int(np.argmax(counts / inputs))
    what = f"{counts[row]:,} blocks of {MOONCAKE_BLOCK_TOKENS} tokens are more than the prompt of "
    what += f"{inputs[row]:,} tokens, and no other size fits all requests."
    hint = "say how many tokens a block has, as in --columns block=16."
    raise rows.error(what, row, "hash_ids", hint)
