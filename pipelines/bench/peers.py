"""Published simulators of LLM serving, as they were measured on the conversation trace."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from hetero import paths
from hetero.display import Column, Table


@dataclass(frozen=True, slots=True)
class Peer:
    """One program in one configuration, run on few and on many requests.

    Attributes
    ----------
    requests, cpu_s
        Requests and CPU time of the larger run.
    requests_per_cpu_s
        Of that run, start-up included.
    marginal_per_cpu_s
        Requests per CPU second between the two runs: what it takes without its start-up.
    """

    program: str
    repository: str
    commit: str
    configuration: str
    requests: int
    cpu_s: float
    marginal_per_cpu_s: float

    @property
    def requests_per_cpu_s(self) -> float:
        """Requests per CPU second of the larger run."""
        return self.requests / self.cpu_s


def peers() -> tuple[Peer, ...]:
    """The peers of ``data/published/peers.csv``.

    Examples
    --------
    >>> [round(peer.requests_per_cpu_s) for peer in peers()]
    [639, 153, 307, 479, 1]
    """
    runs: dict[tuple[str, str, str, str], list[tuple[int, float]]] = {}
    with paths.data("published", "peers.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            names = (row["program"], row["repository"], row["commit"], row["configuration"])
            runs.setdefault(names, []).append((int(row["requests"]), float(row["cpu_s"])))
    found = []
    for names, pairs in runs.items():
        (few, less), (many, more) = min(pairs), max(pairs)
        found.append(Peer(*names, many, more, (many - few) / (more - less)))
    return tuple(found)


def table(own_per_cpu_s: float) -> Table:
    """Peers beside what this library reaches on the same trace, without start-up on both sides."""
    columns = (
        Column("program"),
        Column("configuration"),
        Column("requests"),
        Column("whole run", "requests/CPU s", 3, of="requests_per_cpu_s"),
        Column("without start-up", "requests/CPU s", 3, of="marginal_per_cpu_s"),
        Column(
            "hetero", "times as fast", 3, of=lambda peer: own_per_cpu_s / peer.marginal_per_cpu_s
        ),
    )
    return Table.of(
        "Peers on the conversation trace (measured apart, quoted)",
        columns,
        peers(),
        "Each on its own models and hardware tables, 2 cores of an AMD EPYC virtual machine; "
        "commits and run times in data/published/peers.csv.",
    )
