"""Plan, route and simulate large language model serving on mixed fleets of GPUs."""

__version__ = "0.1.0"
