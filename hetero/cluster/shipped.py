"""The clusters that hetero ships, and those of files, by name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from hetero import paths
from hetero.catalog import Records
from hetero.cluster.topology import Cluster


@lru_cache(maxsize=1)
def clusters() -> Records[Cluster]:
    """All clusters that hetero ships: those of the five papers, and three current fleets."""
    files = sorted(paths.data("clusters").glob("*.yaml"))
    return Records("cluster", [Cluster.load(path) for path in files])


def cluster(name: str) -> Cluster:
    """Shipped cluster of that name.

    Raises
    ------
    CatalogError
        If there is none, with the nearest names.
    """
    return clusters().find(name)


def find(name: str | Path) -> Cluster:
    """Shipped cluster of that name, or the one of a file, see :mod:`hetero.cluster.found`."""
    shipped = None if isinstance(name, Path) else clusters().get(name)
    if shipped is None and (Path(name).suffix or Path(name).exists()):
        return Cluster.load(name)
    return shipped or cluster(str(name))
