"""Islands of equal GPUs that prefill or decode ranges of input lengths (Rignall).

Read :mod:`~hetero.planners.islands.rates` first: what every island class serves of every range,
the one table between the latency model and the solvers.
"""

from hetero.planners.islands.rates import IslandClass, RateTable

__all__ = ["IslandClass", "RateTable"]
