"""The best plan by simulation: every design of whole replicas, weak ones discarded by a bound."""
