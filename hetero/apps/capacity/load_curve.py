"""The load of a service over a day, hour by hour."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import DataError, ParameterError
from hetero.workload import Trace


@dataclass(frozen=True, slots=True)
class LoadCurve(Shown):
    """Requests per second, hour by hour.

    Examples
    --------
    >>> LoadCurve((2.0, 8.0, 4.0), "three hours").peak_rps
    8.0
    """

    rates_rps: tuple[float, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.rates_rps or not all(0 < rate < np.inf for rate in self.rates_rps):
            raise ParameterError(
                f"A load curve of {len(self.rates_rps)} hours needs rates above 0.",
                resolve="give one rate above 0 per hour.",
            )

    @property
    def peak_rps(self) -> float:
        """Largest rate [requests/s]."""
        return max(self.rates_rps)

    @property
    def end_s(self) -> float:
        """Its length [s]."""
        return 3600.0 * len(self.rates_rps)

    @classmethod
    def load(cls, path: Path | str) -> LoadCurve:
        """Curve from a CSV file with the columns ``hour`` (0, 1, ...) and ``rate_rps``.

        Raises
        ------
        DataError
            If the file is missing, lacks a column, or its hours are not 0, 1, ... in order.
        """
        path = Path(path)
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error):
            raise DataError(
                "The file cannot be read.", path=path, resolve="give a CSV file of hour,rate_rps."
            ) from None
        rates = []
        for n, row in enumerate(rows):
            try:
                hour, rate = float(row["hour"]), float(row["rate_rps"])
            except (KeyError, TypeError, ValueError):
                raise DataError(
                    "An hour and a rate are expected.",
                    path=path,
                    line=n + 2,
                    resolve="give the columns hour,rate_rps with a number in each.",
                ) from None
            if hour != n or not 0 < rate < np.inf:
                raise DataError(
                    f"Received hour {hour:g} at {rate:g} requests/s.",
                    path=path,
                    line=n + 2,
                    resolve="give hours 0, 1, 2, ... in order, each with a rate above 0.",
                )
            rates.append(rate)
        if not rates:
            raise DataError("No hour is given.", path=path, resolve="give one row per hour.")
        return cls(tuple(rates), path.name)

    @classmethod
    def of(cls, trace: Trace, *, peak_rps: float | None = None) -> LoadCurve:
        """Arrivals of a trace counted by the hour, whole hours only.

        Parameters
        ----------
        peak_rps
            Scale the curve to this peak.
        """
        start = float(trace.arrival_s[0])
        hours = int((float(trace.arrival_s[-1]) - start) // 3600)
        if hours < 2:
            raise ParameterError(
                f"{trace.name} spans {hours} whole hours, which make no curve.",
                resolve="give a trace of several hours, or a CSV file of hour,rate_rps.",
            )
        counts = np.histogram(trace.arrival_s - start, bins=np.arange(hours + 1) * 3600.0)[0]
        rates = counts / 3600.0
        if peak_rps is not None:
            rates = rates * (peak_rps / rates.max())
        return cls(tuple(float(rate) for rate in rates), trace.source)

    def table(self) -> Table:
        """One row per hour."""
        rows = tuple((hour, rate) for hour, rate in enumerate(self.rates_rps))
        return Table(self.source, (Column("hour"), Column("load", "requests/s")), rows)
