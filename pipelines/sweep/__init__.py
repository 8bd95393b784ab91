"""Sweeps: one notebook over many parameter values, each point kept as it ends."""
