"""Checks of command-line options that several commands share."""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Any, get_args

from hetero.errors import ParameterError

if TYPE_CHECKING:
    from hetero.simulator import Metrics, Slo
    from hetero.workload import Trace

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_TARGET = re.compile(r"\s*(ttft|tpot|e2e)\s*=\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(us|ms|s|min)\s*")


def choice(option: str, value: str, allowed: Any) -> Any:
    """Return ``value`` if it is one of a ``Literal``'s values, or of a collection of names.

    Raises
    ------
    ParameterError
        Naming the option, what was received and the values it may take.
    """
    values = [str(v) for v in get_args(allowed) or allowed]
    if value not in values:
        near = difflib.get_close_matches(value, values, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ParameterError(
            f"{option} does not know '{value}'.", resolve=f"{hint}use one of {', '.join(values)}."
        )
    return value


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers of an option that takes several, by commas.

    Raises
    ------
    ParameterError
        Naming the option and what was received.

    Examples
    --------
    >>> whole_numbers("--batch", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(
            f"{option} cannot read '{text}'.", resolve="write whole numbers, such as 1,2,4."
        ) from None


def targets(text: str) -> Slo:
    """Targets of an ``--slo`` option, such as ``ttft=500ms,tpot=50ms``; none for an empty text.

    Raises
    ------
    ParameterError
        If a part cannot be read or is given twice.
    """
    from hetero.simulator import Slo

    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        match = _TARGET.fullmatch(part)
        if match is None:
            raise ParameterError(
                f"--slo cannot read '{part.strip()}'.",
                resolve="write targets with their unit, such as ttft=500ms,tpot=50ms,e2e=30s.",
            )
        try:
            value_s = float(match[2]) * _UNITS_S[match[3]]
        except ValueError:
            raise ParameterError(
                f"--slo: '{match[2]}' is no number.", resolve="write one, such as 0.5."
            ) from None
        if f"{match[1]}_s" in found:
            raise ParameterError(f"--slo gives {match[1]} twice.", resolve="give each target once.")
        found[f"{match[1]}_s"] = value_s
    return Slo(**found)


def to_json(value: object) -> str:
    """JSON text with a line end, as every ``--json`` option prints it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def arrivals(trace: Trace, requests: int | None, rate: float | None, seed: int) -> Trace:
    """The first requests, at the rate asked for: bursts kept where the trace has arrivals."""
    import math

    from hetero.errors import ParameterError
    from hetero.streams import stream
    from hetero.workload import statistics

    if requests is not None:
        trace = trace.head(min(requests, len(trace)))
    if rate is None:
        return trace
    if not rate > 0:
        raise ParameterError(
            f"A rate of {rate:g} requests/s serves nothing.",
            resolve="give a number above 0, or inf to send all requests at once.",
        )
    if math.isinf(rate):
        return trace.all_at_once()
    if math.isinf(statistics.rate_rps(trace.arrival_s)):
        return trace.poisson(rate, stream(seed, "arrivals"))
    return trace.rescale(rate_rps=rate)


def plain(one: Metrics) -> dict[str, Any]:
    """Metrics as JSON values; what is not a number becomes null."""
    import math
    from dataclasses import asdict

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): clean(each) for key, each in value.items()}
        if isinstance(value, tuple):
            return [clean(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    record: dict[str, Any] = clean(asdict(one) | {"total_tps": one.total_tps})
    return record
