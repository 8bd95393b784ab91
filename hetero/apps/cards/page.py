"""A plan card as HTML: a fragment for JupyterLab and a page of its own, without a network.

All colours come from the text around it, so that light and dark themes both work; the two accents
are told apart by people who see red and green alike.
"""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from hetero.apps.cards import sections
from hetero.display import PLAIN, Table

if TYPE_CHECKING:
    from hetero.apps.cards.card import PlanCard, Sampled

_STYLE = """
.hetero-card{font-size:13px;line-height:1.45;max-width:1000px}
.hetero-card h2{font-size:17px;margin:0 0 6px}
.hetero-card h3{font-size:13px;margin:18px 0 4px}
.hetero-card p{margin:2px 0}
.hetero-card .figures{display:flex;flex-wrap:wrap;gap:10px 28px;margin:10px 0}
.hetero-card .figures b{display:block;font-size:19px;font-weight:600}
.hetero-card small{opacity:.75}
.hetero-card .wide{overflow-x:auto}
.hetero-card table{border-collapse:collapse;margin:2px 0;width:auto}
.hetero-card th,.hetero-card td{padding:2px 12px 2px 0;border:0;background:none;
 border-bottom:1px solid color-mix(in srgb,currentColor 18%,transparent);white-space:nowrap}
.hetero-card th{font-weight:600;vertical-align:bottom;white-space:normal}
.hetero-card details summary{cursor:pointer;font-weight:600;margin:18px 0 4px}
.hetero-card svg text{fill:currentColor;font-size:11px}
.hetero-card .bars{display:grid;gap:2px 10px;align-items:center;margin:10px 0;
 grid-template-columns:max-content minmax(60px,380px) minmax(9em,1fr)}
.hetero-card .bars svg{width:100%;height:24px}
.hetero-card .bars line{vector-effect:non-scaling-stroke}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>:root{{color-scheme:light dark}}
body{{font-family:system-ui,sans-serif;margin:24px auto;max-width:1000px;padding:0 16px}}
@media print{{details{{display:block}}}}</style></head>
<body>{body}</body></html>
"""

_RATES = """
.rates input{position:absolute;opacity:0}
.rates .choice{display:flex;flex-wrap:wrap;gap:4px;align-items:center;margin:6px 0}
.rates label{padding:2px 10px;border-radius:4px;cursor:pointer;
 border:1px solid color-mix(in srgb,currentColor 30%,transparent)}
.rates .figures{display:none;margin:4px 0}
.rates .figures b{font-size:15px}
.rates .curves{display:flex;flex-wrap:wrap}
.rates .at{opacity:0;fill:#3b8fd0}
.rates .axis{fill:none;stroke:currentColor;opacity:.5}
.rates .dotted{stroke-dasharray:2 3}
.rates .target{fill:none;stroke:#d98218;stroke-width:1.5}
.rates polyline{fill:none;stroke:#3b8fd0;stroke-width:1.5}
"""

_BLUE, _ORANGE = "#3b8fd0", "#d98218"
_CHOSEN = "#1f6fb0"  # the blue, dark enough for white text


def page(card: PlanCard) -> str:
    """A page of its own, all details open."""
    body = fragment(card).replace("<details>", "<details open>")
    if card.at_rates:
        body = body.replace("<h3>At other rates</h3>", f"<h3>At other rates</h3>{_rates(card)}")
    return _PAGE.format(title=html.escape(sections.title(card)), body=body)


def fragment(card: PlanCard) -> str:
    """The card inside a page."""
    shown = [sections.replicas(card), sections.delivers(card), sections.latencies(card)]
    parts = [
        f"<style>{_STYLE}</style><div class='hetero-card {PLAIN}'>",
        f"<h2>{html.escape(sections.title(card))}</h2>",
        _figures(card),
        *(f"<p>{html.escape(said)}</p>" for said in sections.headline(card)),
        _bars(card),
        *map(_table, shown),
        *(_table(table) for table in sections.tables(card)[3:-2]),
        *(_folded(table) for table in sections.tables(card)[-2:]),
        *(f"<p><small>{html.escape(note)}</small></p>" for note in card.notes),
        "</div>",
    ]
    return "".join(parts)


def _figures(card: PlanCard) -> str:
    """The figures that are read first, in large type."""
    used = {one.gpu: one.count for one in card.sources}
    found = [("can be promised", f"{sections.show(card.headline_rps)} requests/s")]
    if card.usd_per_h is not None:
        found.append(("cost", f"{sections.show(card.usd_per_h, 4)} $/h"))
    if card.usd_per_mtok is not None:
        found.append(("per 10^6 tokens", f"{sections.show(card.usd_per_mtok.value)} $"))
    found.append(("GPUs in use", ", ".join(f"{n} {name}" for name, n in used.items())))
    return f"<div class='figures'>{_large(found)}</div>"


def _large(found: list[tuple[str, str]]) -> str:
    return "".join(
        f"<div><small>{html.escape(name)}</small><b>{html.escape(value)}</b></div>"
        for name, value in found
    )


def _bars(card: PlanCard) -> str:
    """Goodput on the way to its bound, and the goal's percentile of each latency to its target."""
    bound = None if card.bound is None else card.bound.rate_rps
    rows = [_bar("goodput", card.goodput_rps, "requests/s", 1.0, bound, "bound")]
    tail = min((50, 90, 95, 99), key=lambda p: abs(p - 100 * card.question.goal))
    for name, target in card.question.targets_s.items():
        one = card.latencies_s[name].get(tail)
        if one is not None and math.isfinite(one.value):
            rows.append(_bar(f"{name.upper()} P{tail}", one, "ms", 1e3, target, "target"))
    title = "Goodput and latencies against their limits, with 90 % intervals"
    return f"<div class='bars' role='group' aria-label='{title}'>{''.join(rows)}</div>"


def _bar(name: str, one: Sampled, unit: str, factor: float, limit: float | None, what: str) -> str:
    low, high = one.interval()
    end = max(high, one.value, limit or 0.0) * 1.02 or 1.0

    def x(value: float) -> float:
        return 100.0 * min(max(value, 0.0), end) / end

    color = _ORANGE if what == "target" and limit is not None and one.value > limit else _BLUE
    parts = [
        f"<span>{name}</span><svg viewBox='0 0 100 24' preserveAspectRatio='none'>",
        "<rect y='5' width='100' height='14' fill='currentColor' opacity='.1'/>",
        f"<rect y='5' width='{x(one.value):.1f}' height='14' fill='{color}'/>",
        f"<line x1='{x(low):.1f}' x2='{x(high):.1f}' y1='12' y2='12' stroke='currentColor' "
        "stroke-width='1.5'/>",
    ]
    text = f"{sections.show(factor * one.value)} {unit}"
    if limit is not None:
        at = x(limit)
        parts.append(
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='1' y2='23' stroke='currentColor' "
            "stroke-width='2'/>"
        )
        text += f", {what} {sections.show(factor * limit)}"
    parts.append(f"</svg><span>{html.escape(text)}</span>")
    return "".join(parts)


def _rates(card: PlanCard) -> str:
    """Rates to choose among by mouse or keyboard, drawn and in figures; no script is needed."""
    goodput, rates = card.headline_rps, [one.rate_rps for one in card.at_rates]
    chosen = min(range(len(rates)), key=lambda k: abs(rates[k] - goodput))
    inputs, labels, said, shown = [], [], [], []
    for k, one in enumerate(card.at_rates):
        checked = " checked" * (k == chosen)
        inputs.append(f"<input type='radio' name='rate' id='rate{k}'{checked}>")
        labels.append(f"<label for='rate{k}'>{sections.show(one.rate_rps)}</label>")
        figures = [("within all targets", f"{100.0 * one.met:.1f} %")]
        for name in card.question.targets_s:
            values = ", ".join(sections.show(1e3 * value) for value in one.latencies_s[name])
            figures.append((f"{name.upper()} P50, P90, P99", f"{values} ms"))
        if one.usd_per_mtok is not None:
            figures.append(("per 10^6 tokens", f"{sections.show(one.usd_per_mtok)} $"))
        said.append(f"<div class='figures at{k}'>{_large(figures)}</div>")
        shown.append(
            f"#rate{k}:checked~.figures.at{k}{{display:flex}}"
            f"#rate{k}:checked~.curves .at{k}{{opacity:1}}"
            f"#rate{k}:checked~.choice label[for=rate{k}]{{background:{_CHOSEN};color:#fff}}"
            f"#rate{k}:focus-visible~.choice label[for=rate{k}]{{outline:2px solid {_ORANGE}}}"
        )
    quantities: list[tuple[str, list[list[float]], float]] = [
        (
            "within all targets [%]",
            [[100.0 * one.met] for one in card.at_rates],
            100.0 * card.question.goal,
        )
    ]
    quantities += [
        (
            f"{name.upper()} P50, P90, P99 [ms]",
            [[1e3 * value for value in one.latencies_s[name]] for one in card.at_rates],
            1e3 * target,
        )
        for name, target in card.question.targets_s.items()
    ]
    panels = "".join(
        f"<svg role='img' aria-label='{one[0]}' viewBox='0 0 280 160' width='280'>"
        f"{_curve(rates, goodput, *one)}</svg>"
        for one in quantities
    )
    title = "Share within all targets and latencies by rate; lines: targets, dotted: goodput"
    return (
        f"<style>{_RATES}{''.join(shown)}</style><div class='rates'>{''.join(inputs)}"
        f"<div class='choice'><small>requests/s</small>{''.join(labels)}</div>"
        f"<div class='curves' role='group' aria-label='{title}'>{panels}</div>"
        f"{''.join(said)}</div>"
    )


def _curve(
    rates: list[float], goodput: float, name: str, values: list[list[float]], target: float
) -> str:
    """Values over rates, with their target and the goodput; latencies on a logarithmic axis."""
    finite = [v for row in values for v in row if math.isfinite(v) and v > 0.0]
    percent = name.endswith("[%]")
    low = 0.0 if percent else math.log(min([*finite, target]))
    high = 100.0 if percent else math.log(max([*finite, target]))

    def at(rate: float, value: float) -> str:
        height = value if percent else math.log(max(value, math.exp(low)))
        share = (height - low) / (high - low or 1.0)
        return f"{30 + 200 * rate / rates[-1]:.1f},{130 - 100 * share:.1f}"

    lines = [f"<text x='30' y='16'>{name}</text>", "<path class='axis' d='M30,30V130H230'/>"]
    for k in range(len(values[0])):
        points = " ".join(
            at(rate, row[k])
            for rate, row in zip(rates, values, strict=True)
            if math.isfinite(row[k])
        )
        lines.append(f"<polyline points='{points}' opacity='{1 - 0.3 * k:.1f}'/>")
    x, y = at(goodput, target).split(",")
    lines.append(f"<path class='target' d='M30,{y}H230'/>")
    lines.append(f"<text x='235' y='{float(y) + 4:.1f}'>{sections.show(target)}</text>")
    lines.append(f"<path class='axis dotted' d='M{x},30V130'/>")
    lines.append(f"<text x='{x}' y='146' text-anchor='middle'>{sections.show(goodput)}</text>")
    for k, (rate, row) in enumerate(zip(rates, values, strict=True)):
        dots = (at(rate, value).split(",") for value in row if math.isfinite(value))
        marks = "".join(f"<circle cx='{cx}' cy='{cy}' r='3.5'/>" for cx, cy in dots)
        lines.append(f"<g class='at at{k}'>{marks}</g>")
    return "".join(lines)


def _table(table: Table) -> str:
    body = Table("", table.columns, table.rows, table.notes)._repr_html_()
    return f"<h3>{html.escape(table.title)}</h3><div class='wide'>{body}</div>"


def _folded(table: Table) -> str:
    body = Table("", table.columns, table.rows, table.notes)._repr_html_()
    title = html.escape(table.title)
    return f"<details><summary>{title}</summary><div class='wide'>{body}</div></details>"
