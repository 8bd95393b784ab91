"""Planners of earlier systems on the same cost model and simulator, to compare plans with."""
