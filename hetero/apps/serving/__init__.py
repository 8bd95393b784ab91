"""Serving: the routers of the simulator in front of real engines."""

from hetero.apps.serving.settings import Backend, DeploymentFile, DispatcherLimits, load

__all__ = ["Backend", "DeploymentFile", "DispatcherLimits", "load"]
