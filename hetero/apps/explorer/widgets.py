"""Dropdowns and sliders in front of :func:`hetero.apps.explorer.explore`; needs ``hetero[lab]``."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping
from typing import Any

import ipywidgets

from hetero import catalog, workload
from hetero import cluster as clusters
from hetero.apps.explorer.view import View, explore
from hetero.cluster import Cluster
from hetero.deployment import Deployment
from hetero.errors import HeteroError
from hetero.plots import figures
from hetero.routers import factories
from hetero.simulator import Slo
from hetero.workload import Trace, TraceSource

_DPI = 100


class Explorer(ipywidgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The explorer in JupyterLab: every change calls :func:`explore` once and shows its view.

    By keys: Tab to a control, then Space, arrows and Enter in a menu, PageUp and PageDown or the
    number beside it at a slider.

    Parameters
    ----------
    fleets
        Clusters, or deployments that planners have made, by the names to choose from; by default
        the shipped clusters.
    workloads
        Traces by the names to choose from; by default the shipped ones.
    routers
        Routers of your own, objects or classes by the names to choose from, before the built-in.
    cluster, model, requests, router, rate_rps, slo
        What is chosen at first.
    source
        ``twin`` or ``real``, for shipped workloads.
    simulated
        Requests that are taken of a workload.

    Attributes
    ----------
    view
        The view that is shown; None where the choice cannot be served.
    """

    def __init__(
        self,
        *,
        fleets: Mapping[str, Cluster | Deployment] | None = None,
        workloads: Mapping[str, Trace] | None = None,
        routers: Mapping[str, Any] | None = None,
        cluster: str | None = None,
        model: str = "Llama-3-8B",
        requests: str | None = None,
        router: str | None = None,
        rate_rps: float = 10.0,
        slo: Slo | None = None,
        source: TraceSource = "twin",
        simulated: int = 1500,
    ) -> None:
        self._fleets = fleets or {one.name: one for one in clusters.clusters()}
        shipped: dict[str, Trace | str] = {name: name for name in workload.names(source)}
        self._workloads = dict(workloads) if workloads else shipped
        own, known = dict(routers or {}), factories()
        self._routers = own | {one: one for one in known if one not in own}
        self._source, self._simulated = source, simulated
        self.view: View | None = None
        slo = slo or Slo(ttft_s=1.0, tpot_s=0.1)
        self.cluster = _dropdown("cluster", list(self._fleets), cluster)
        self.model = _dropdown("model", list(catalog.llms().names), model)
        self.workload = _dropdown("workload", list(self._workloads), requests)
        router = router or next(iter(own), "hetero")
        self.router = _dropdown("router", list(self._routers), router)
        self.rate_rps = _slider("requests/s", rate_rps, -1.0, 3.0)
        self.ttft_s = _slider("TTFT [s]", slo.ttft_s or 1.0, -1.5, 2.0)
        self.tpot_ms = _slider("TPOT [ms]", 1e3 * (slo.tpot_s or 0.1), 0.5, 3.0)
        self._figure = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self._text = ipywidgets.HTML()
        chosen = [self.cluster, self.model, self.workload, self.router]
        moved = [self.rate_rps, self.ttft_s, self.tpot_ms]
        for control in (*chosen, *moved):
            control.observe(self._show, names="value")
        rows = (ipywidgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in (chosen, moved))
        super().__init__([*rows, self._figure, self._text])
        self._show(None)

    def _show(self, change: object) -> None:
        try:
            self.view = explore(
                self._fleets[self.cluster.value],
                self._workloads[self.workload.value],
                self.rate_rps.value,
                Slo(ttft_s=self.ttft_s.value, tpot_s=1e-3 * self.tpot_ms.value),
                self._routers[self.router.value],
                llm=self.model.value,
                source=self._source,
                requests=self._simulated,
            )
        except HeteroError as error:
            self.view = None
            self._figure.layout.display = "none"
            # The theme's own colour, readable on light and dark.
            colour = "var(--jp-error-color1, #b00020)"
            style = f"border-left:3px solid {colour};padding:4px 10px;line-height:1.4"
            self._text.value = f'<div style="{style}">{html.escape(str(error))}</div>'
            return
        if bound := self.view.plan.bound_rps:
            self.rate_rps.max = math.log10(2.0 * bound)  # beyond it only queues grow
        self._figure.value = _png(self.view)
        self._figure.layout.display = ""
        self._text.value = f'<div style="line-height:normal">{self.view._repr_html_()}</div>'


def _png(view: View) -> bytes:
    found = io.BytesIO()
    figure = view.figure()
    figure.savefig(found, format="png", dpi=_DPI)
    figures.close(figure)  # else the notebook would show it a second time
    return found.getvalue()


def _dropdown(label: str, options: list[str], chosen: str | None) -> Any:
    return ipywidgets.Dropdown(
        options=options, value=options[0] if chosen is None else chosen, description=label
    )


def _slider(label: str, value: float, low: float, high: float) -> Any:
    return ipywidgets.FloatLogSlider(
        value=value, min=low, max=high, step=0.02, description=label, readout_format=".3g",
        continuous_update=False, layout={"width": "320px"},
    )  # fmt: skip
