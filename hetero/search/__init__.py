"""The race of all planners, and the best plan by simulation, weak designs discarded by a bound."""
