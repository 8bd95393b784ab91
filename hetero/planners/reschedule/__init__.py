"""Rescheduling: when to change a deployment in service, to what, and what the change costs."""
