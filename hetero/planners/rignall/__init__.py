"""Islands of equal GPUs that prefill or decode ranges of input lengths (Rignall).

Read :mod:`~hetero.planners.rignall.rates` first: what every island class serves of every range,
the one table between the latency model and the solvers.

===================  ============================================================================
model, parallelism   rates from the latency model: parallelism per phase, readings of the thesis
inner                work for given islands
exact                the best layout of an inventory, proven
divider, direct,     the thesis's searches for layouts
search
replay               a plan as a deployment and its routing rule, for the simulator
===================  ============================================================================
"""

from hetero.planners.rignall.rates import IslandClass, RateTable

__all__ = ["IslandClass", "RateTable"]
