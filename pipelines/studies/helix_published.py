"""What Helix's artifact prints for its experiments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, TypeAlias

from hetero import paths

Mode: TypeAlias = Literal["offline", "online"]


@lru_cache(maxsize=1)
def _expected() -> Any:
    import pandas as pd

    return pd.read_csv(paths.data("published", "helix_expected.csv"))


def expected(
    case: str, mode: Mode, *, how: str = "simulation", experiment: str | None = None
) -> dict[str, float]:
    """What the artifact prints for a case: decode throughput and latencies by metric.

    Parameters
    ----------
    how
        ``"simulation"``, or ``"prototype"`` for its real 24 nodes.
    experiment
        ``"model_placement"`` or ``"request_scheduling"`` where not that of Helix's Fig. 6 to 8.

    Examples
    --------
    >>> expected("geo-24 70B helix", "offline")
    {'decode_throughput': 98.0}
    """
    cluster, model, method = case.split(" ", 2)
    usual = {"single-24": "single_cluster", "geo-24": "geo_distributed"}
    frame = _expected()
    wanted = {
        "experiment": experiment or usual.get(cluster, "high_heterogeneity"),
        "cluster": cluster,
        "model": model,
        "method": method.replace(" ", "_"),
        "mode": mode,
        "run": how,
    }
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    return dict(zip(frame["metric"], frame["value"], strict=True))
