"""Serving: the routers of the simulator in front of real engines."""

from hetero.apps.serving.settings import Backend, Limits, Settings, load

__all__ = ["Backend", "Limits", "Settings", "load"]
