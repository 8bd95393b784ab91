"""Readers of trace files; a bad row ends in an error that names file, line and column."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
import pyarrow.json
from numpy.typing import NDArray

from hetero.errors import DataError, ParameterError
from hetero.rows import Rows, heading, listed, read_rows, reading
from hetero.workload.statistics import rate_rps
from hetero.workload.trace import Trace

#: Mean rates [requests/s] outside these bounds are taken for a wrong unit of time.
PLAUSIBLE_RPS = (1 / 60, 1000.0)
#: Traces shorter than this say nothing on the unit of time.
PLAUSIBLE_REQUESTS = 10

#: Tokens per prefix block of the Mooncake traces, as their description states.
MOONCAKE_BLOCK_TOKENS = 512

# Columns that Trace.to_csv and to_parquet add when a trace has them.
_OWN_COLUMNS = ("session_id", "priority", "block_tokens", "prefix_ids")

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns", "datetime"]
"""What the arrival column counts; ``datetime`` is text such as 2023-11-16 18:17:03.97."""

_KEYS = {
    "arrival": "arrival",
    "input": "input_tokens",
    "output": "output_tokens",
    "session": "session",
    "unit": "time_unit",
}
_WORDS = ("sort", "rebase")

_PER_SECOND: dict[str, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_INT32 = np.iinfo(np.int32).max

_Prefixes = tuple[NDArray[np.int64], NDArray[np.int64], int]  # offsets, ids, tokens per block


def read(path: Path | str, *, columns: str = "", sort: bool = False) -> Trace:
    """Trace of a file whose kind is told by its ending and heading, or by its named columns.

    Knows Azure CSV, Mooncake JSONL, the CSV and Parquet that :class:`Trace` writes, and length
    lists (``input_tokens`` and ``output_tokens`` alone).

    Parameters
    ----------
    columns
        Of a file that is of none of these kinds: ``arrival``, ``input``, ``output`` and ``session``
        with the names of their columns, ``unit`` (:data:`TimeUnit`; by default seconds, or
        ``datetime`` where the first arrival is no number), and the words ``sort`` (put requests in
        order) and ``rebase`` (count arrivals from the first), such as
        ``"arrival=ts,input=prompt,output=reply,unit=ms,sort"``.

    Raises
    ------
    DataError
        If the file cannot be read, is of another kind, or has a bad row.
    """
    file = Path(path)
    if columns:
        return _read_named(file, columns, sort)
    if ".jsonl" in file.suffixes:
        return read_mooncake(file, sort=sort)
    names = set(heading(file))
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return read_azure(file, sort=sort)
    if {"arrival_s", "input_tokens", "output_tokens"} <= names:
        return read_table(file, sort=sort)
    if {"input_tokens", "output_tokens"} <= names:
        return read_lengths(file)
    raise DataError(
        f"its columns {listed(names)} are of no known kind of trace.",
        path=file,
        resolve="name its columns, as in --columns arrival=time,input=prompt,output=reply.",
    )


def _read_named(file: Path, columns: str, sort: bool) -> Trace:
    """Trace of a file whose columns a text names, see :func:`read`."""
    known: dict[str, Any] = {}
    for part in columns.split(","):
        key, _, value = (each.strip() for each in part.partition("="))
        good = value == "" if key in _WORDS else key in _KEYS and value != ""
        if not good or key in known:
            raise ParameterError(
                f"The columns cannot be read at '{part.strip()}'.",
                resolve=f"write each of {', '.join(_KEYS)} at most once with a value, and the "
                f"words {' and '.join(_WORDS)}, as in arrival=time,input=prompt,output=reply.",
            )
        known[key] = value
    if known.keys() == {"sort"}:
        return read(file, sort=True)
    unit = known.get("unit")
    if unit not in (None, *get_args(TimeUnit)):
        raise ParameterError(
            f"'{unit}' is no unit of time.", resolve=f"use {', '.join(get_args(TimeUnit))}."
        )
    named = {_KEYS[key]: value for key, value in known.items() if key in _KEYS}
    if "arrival" not in named and "arrival_s" not in heading(file):
        return read_lengths(file, **named)
    named.setdefault("time_unit", _unit_of(file, named.setdefault("arrival", "arrival_s")))
    return read_table(file, **named, sort=sort or "sort" in known, rebase="rebase" in known or None)


def _unit_of(file: Path, arrival: str) -> TimeUnit:
    """Seconds, or dates where the first arrival is no number."""
    first = read_rows(file, (arrival,)).frame[arrival].head(1)
    if pd.api.types.is_datetime64_any_dtype(first.dtype):
        return "datetime"
    return "datetime" if pd.to_numeric(first, errors="coerce").isna().any() else "s"


def read_azure(path: Path | str, *, name: str = "", sort: bool = False) -> Trace:
    """Azure LLM inference trace: TIMESTAMP, ContextTokens, GeneratedTokens.

    Arrivals count from the first request. The format is that of the releases of 2023 and 2024
    (AzurePublicDataset; Patel et al., ISCA 2024).

    Raises
    ------
    DataError
        If the file cannot be read or a row is bad.
    """
    return read_table(
        path,
        arrival="TIMESTAMP",
        input_tokens="ContextTokens",
        output_tokens="GeneratedTokens",
        time_unit="datetime",
        name=name,
        sort=sort,
    )


def read_mooncake(path: Path | str, *, name: str = "", sort: bool = False) -> Trace:
    """Mooncake trace: JSON lines of timestamp [ms], input_length, output_length, hash_ids.

    Each hash id stands for a prefix block of 512 tokens (Qin et al., FAST 2025).

    Raises
    ------
    DataError
        If the file cannot be read or a line is bad.
    """
    file = Path(path)
    try:
        with reading(file):
            table = pyarrow.json.read_json(str(file))
            with file.open(encoding="utf-8") as text:
                lines = [number for number, line in enumerate(text, start=1) if line.strip()]
    except DataError:
        _blame_line(file)
        raise
    fields = ("timestamp", "input_length", "output_length")
    rows = Rows(
        pd.DataFrame({field: table[field].to_pandas() for field in table.column_names}),
        file,
        lines,
    )
    if len(lines) != len(rows):
        raise rows.error(
            f"{len(lines)} lines hold {len(rows)} requests.",
            None,
            None,
            "write one request per line as a JSON object.",
        )
    for field in fields:
        if field not in rows.frame:
            raise rows.error("no line has this field.", None, field, "add it to every line.")
    return _trace(
        rows,
        *fields,
        time_unit="ms",
        name=name,
        sort=sort,
        prefixes=_prefixes(rows, "hash_ids", MOONCAKE_BLOCK_TOKENS),
    )


def read_lengths(
    path: Path | str,
    *,
    input_tokens: str = "input_tokens",
    output_tokens: str = "output_tokens",
    name: str = "",
) -> Trace:
    """List of (input, output) lengths as CSV, CSV.gz or Parquet; all requests arrive at once.

    Raises
    ------
    DataError
        If the file cannot be read, a column is missing or a row is bad.
    """
    rows = read_rows(Path(path), (input_tokens, output_tokens))
    return _trace(rows, None, input_tokens, output_tokens, name=name)


def read_table(
    path: Path | str,
    *,
    arrival: str = "arrival_s",
    input_tokens: str = "input_tokens",
    output_tokens: str = "output_tokens",
    session: str | None = None,
    time_unit: TimeUnit = "s",
    sort: bool = False,
    rebase: bool | None = None,
    plausible_rps: tuple[float, float] = PLAUSIBLE_RPS,
    name: str = "",
) -> Trace:
    """Trace of any CSV, CSV.gz or Parquet file, its columns named by the caller.

    Parameters
    ----------
    arrival, input_tokens, output_tokens, session
        Names of the columns in the file; ``session`` is optional, and may hold text.
    time_unit
        What the arrival column counts.
    sort
        Put requests in the order of their arrival instead of refusing an unsorted file.
    rebase
        Count arrivals from the first request; by default only dates are counted so.
    plausible_rps
        A mean rate outside these bounds [requests/s] is taken for a wrong ``time_unit``.

    Raises
    ------
    DataError
        If the file cannot be read, a column is missing, a value is negative, missing, not a
        number or out of order, or the span does not fit the unit of time.
    """
    wanted = (arrival, input_tokens, output_tokens) + (() if session is None else (session,))
    rows = read_rows(Path(path), wanted, optional=_OWN_COLUMNS)
    block_tokens = 0
    if "block_tokens" in rows.frame and len(rows):
        block_tokens = int(rows.whole("block_tokens", 1, _INT32)[0])
    return _trace(
        rows,
        arrival,
        input_tokens,
        output_tokens,
        session=session or ("session_id" if "session_id" in rows.frame else None),
        time_unit=time_unit,
        sort=sort,
        rebase=rebase,
        plausible_rps=plausible_rps,
        name=name,
        prefixes=_prefixes(rows, "prefix_ids", block_tokens),
    )


def _trace(
    rows: Rows,
    arrival: str | None,
    inputs: str,
    outputs: str,
    *,
    session: str | None = None,
    time_unit: TimeUnit = "s",
    sort: bool = False,
    rebase: bool | None = None,
    plausible_rps: tuple[float, float] = PLAUSIBLE_RPS,
    name: str = "",
    prefixes: _Prefixes | None = None,
) -> Trace:
    count = len(rows)
    if count == 0:
        raise DataError("it has no requests.", path=rows.path, resolve="pass a file with rows.")
    offsets, ids, block_tokens = prefixes or (None, None, 0)
    trace = Trace(
        arrival_s=np.zeros(count),
        input_tokens=rows.whole(inputs, 1, _INT32).astype(np.int32),
        output_tokens=rows.whole(outputs, 0, _INT32).astype(np.int32),
        name=name or rows.path.name.split(".")[0],
        source=f"file:{rows.path.name}",
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
    arrival_s = _seconds(rows, arrival, time_unit)
    if rebase or (rebase is None and time_unit == "datetime"):
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
    _check_span(rows, arrival, arrival_s, time_unit, plausible_rps)
    return replace(trace, arrival_s=arrival_s)


def _seconds(rows: Rows, column: str, unit: TimeUnit) -> NDArray[np.float64]:
    """Arrivals of a column in seconds; dates count from the earliest."""
    if unit != "datetime":
        found = rows.numbers(column)
        what = "a time of arrival (it is negative)"
        rule = "count arrivals from a moment before the first request."
        rows.refuse(found < 0, column, what, rule)
        return found / _PER_SECOND[unit]
    # Stamps with and without a fraction of a second may alternate in one file.
    stamps = pd.to_datetime(rows.frame[column], errors="coerce", utc=True, format="ISO8601")
    rule = "write dates as 2023-11-16 18:17:03.97, or pass the time_unit of the column."
    rows.refuse(stamps.isna().to_numpy(), column, "a date and time", rule)
    ticks = stamps.astype("datetime64[ns, UTC]").astype("int64").to_numpy()
    return np.asarray((ticks - ticks.min()) / 1e9)


def _check_span(
    rows: Rows,
    column: str,
    arrival_s: NDArray[np.float64],
    unit: TimeUnit,
    plausible_rps: tuple[float, float],
) -> None:
    rate = rate_rps(arrival_s)
    if len(arrival_s) >= PLAUSIBLE_REQUESTS and np.isfinite(rate):
        low, high = plausible_rps
        if not low <= rate <= high:
            raise rows.error(
                f"{len(arrival_s):,} requests over {arrival_s[-1] - arrival_s[0]:.4g} s are "
                f"{rate:.3g} requests/s, so the time_unit '{unit}' seems wrong for values up to "
                f"{arrival_s[-1] * _PER_SECOND.get(unit, 1.0):.10g}.",
                len(arrival_s) - 1,
                column,
                f"pass the right time_unit (--columns unit=...), or plausible_rps if {rate:.3g} "
                "requests/s are meant.",
            )
    if arrival_s[0] > 1e8:  # three years: counted from 1970, not from a start
        raise rows.error(
            f"the first request arrives after {arrival_s[0]:.4g} s, as if counted from 1970.",
            0,
            column,
            "pass rebase=True (--columns rebase) to count from the first request.",
        )


def _prefixes(rows: Rows, column: str, block_tokens: int) -> _Prefixes | None:
    """Offsets and ids of the prefix blocks: lists, or text with spaces between the ids."""
    if column not in rows.frame:
        return None
    lists: list[list[int]] = []
    for row, value in enumerate(rows.frame[column]):
        try:
            blocks = value.split() if isinstance(value, str) else value
            lists.append([int(block) for block in blocks])
            np.array(lists[-1], dtype=np.int64)
        except (ValueError, TypeError, OverflowError):
            raise rows.error(
                f"'{str(value)[:40]}' is no list of block ids.",
                row,
                column,
                "give every request a list of whole numbers (in CSV separated by spaces).",
            ) from None
    offsets = np.concatenate([[0], np.cumsum([len(blocks) for blocks in lists])])
    ids = np.asarray([block for blocks in lists for block in blocks], dtype=np.int64)
    return offsets.astype(np.int64), ids, block_tokens


def _blame_line(path: Path) -> None:
    """Raise for the first line that is not a JSON object; the fast parser names none."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                good = not line.strip() or isinstance(json.loads(line), dict)
            except (ValueError, RecursionError):
                good = False
            if not good:
                raise DataError(
                    f"this is no JSON object: {line.strip()[:40]!r}.",
                    path=path,
                    line=number,
                    resolve="write one request per line as a JSON object.",
                )
