"""Errors of latency models row by row: by GPU, model, phase, batch and length, inside or outside.

A fit is only as good as the range it was made on. Here each affine fit sees the small settings of
a table and is asked for all of them, so that what it does beyond its range shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from hetero.arrays import Flags, Floats
from hetero.catalog import gpu
from hetero.errors import FitError
from hetero.latency.calibration import roofline_fit
from hetero.latency.frames import Source
from hetero.latency.models.affine import fit
from hetero.latency.models.efficiencies import efficiency
from hetero.latency.models.phase import Form
from hetero.latency.tables import Measurements
from pipelines.studies.roofline_calibration import tables


def row_errors_frame(
    source: Source, *, raw: bool = False, most_batch: float = 16.0, most_tokens: float = 2048.0
) -> pd.DataFrame:
    """Error of the calibrated roofline and of affine fits on every row of a source.

    Parameters
    ----------
    most_batch, most_tokens
        Largest batch and length per request of the rows that affine fits see.

    Returns
    -------
    One row per setting and latency model: source, gpu, engine, llm, degree, phase, batch, length
    [tokens per request], model (``roofline`` or ``affine``), inside (whether the model saw such
    settings), error_percent. Tables whose small settings do not determine a fit have no affine
    rows.
    """
    found = []
    for table in tables(source, raw=raw):
        label = f"{source}/{table.engine.split()[0]}" if source == "aiconfigurator" else source
        roofline = roofline_fit.predict(table, efficiency(gpu(table.gpu), label))
        part = roofline_fit.takes_part(table)
        found.append(_rows(table, "roofline", roofline, np.full(len(table.batch), part)))
        inside = (table.batch <= most_batch) & (table.length_tokens <= most_tokens)
        affine = _affine(table, inside)
        if affine is not None:
            found.append(_rows(table, "affine", affine, inside))
    return pd.concat(found, ignore_index=True)


def _affine(table: Measurements, inside: Flags) -> Floats | None:
    """Times [s] of the affine fit to the rows inside, for every row."""
    form: Form = "cross" if table.source == "splitwise" else "full"
    try:
        prefill, decode = fit(table.where(inside), form=form)
    except FitError:
        return None
    if prefill is None or decode is None:
        return None
    b, length = table.batch, table.length_tokens
    return np.where(
        table.decode, decode.predict(b, length).seconds, prefill.predict(b, length).seconds
    )


def _rows(table: Measurements, model: str, seconds: Floats, inside: Flags) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "source": table.source,
            "gpu": table.gpu,
            "engine": table.engine,
            "llm": table.llm,
            "degree": table.tensor_parallel,
            "phase": np.where(table.decode, "decode", "prefill"),
            "batch": table.batch,
            "length": table.length_tokens,
            "model": model,
            "inside": inside,
            "error_percent": 100.0 * (seconds / table.seconds - 1.0),
        }
    )


def summarise(errors: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Mean size, bias, 95th percentile and largest size of errors [%] per group.

    Examples
    --------
    >>> frame = pd.DataFrame({"gpu": ["a", "a"], "error_percent": [-10.0, 30.0]})
    >>> summarise(frame, ["gpu"]).round(1).to_dict("records")
    [{'gpu': 'a', 'rows': 2, 'mape': 20.0, 'bias': 10.0, 'p95': 29.0, 'largest': 30.0}]
    """
    groups = errors.assign(size=errors["error_percent"].abs()).groupby(list(by), sort=True)
    return pd.DataFrame(
        {
            "rows": groups.size(),
            "mape": groups["size"].mean(),
            "bias": groups["error_percent"].mean(),
            "p95": groups["size"].quantile(0.95),
            "largest": groups["size"].max(),
        }
    ).reset_index()
