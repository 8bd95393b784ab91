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
    from hetero.apps.cards.card import PlanCard, Sampled, TriedPlanner

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
.hetero-card svg.front{width:100%;max-width:470px}
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

_BLUE, _ORANGE = "#3b8fd0", "#d98218"


def page(card: PlanCard) -> str:
    """A page of its own, all details open."""
    body = fragment(card).replace("<details>", "<details open>")
    return _PAGE.format(title=html.escape(sections.title(card)), body=body)


def fragment(card: PlanCard) -> str:
    """The card inside a page."""
    *shown, tried, sources = sections.tables(card)
    parts = [
        f"<style>{_STYLE}</style><div class='hetero-card {PLAIN}'>",
        f"<h2>{html.escape(sections.title(card))}</h2>",
        _figures(card),
        *(f"<p>{html.escape(said)}</p>" for said in sections.headline(card)),
        _bars(card),
        *(
            _table(one) + (_front(card) if one.title == sections.FRONT and one.rows else "")
            for one in shown
        ),
        *(_table(table, folded=True) for table in (tried, sources)),
        *(f"<p><small>{html.escape(note)}</small></p>" for note in sections.later(card)),
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
    shown = (
        f"<div><small>{html.escape(name)}</small><b>{html.escape(value)}</b></div>"
        for name, value in found
    )
    return f"<div class='figures'>{''.join(shown)}</div>"


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


def _front(card: PlanCard) -> str:
    """Cost against goodput of what was tried, and the front of it, a dot per plan or part."""
    tried = sections.carrying(card)
    most, top = max(one.cost for one in tried), max(one.goodput_rps for one in tried)

    def at(one: TriedPlanner) -> str:
        return f"{60 + 360 * one.cost / (most or 1.0):.1f} {150 - 135 * one.goodput_rps / top:.1f}"

    dots = (
        f"<path d='M{at(one)}h0' stroke='{_ORANGE if one.planner == card.planner else _BLUE}' "
        f"stroke-width='8' stroke-linecap='round'><title>{html.escape(one.planner)}: "
        f"{html.escape(sections.in_words(one.gpus))}, {sections.show(one.goodput_rps)} requests/s"
        "</title></path>"
        for one in tried
    )
    return (
        "<svg class='front' viewBox='0 0 470 190' role='img' aria-label='Cost against goodput of "
        "what was tried, and the front'>"
        "<path d='M60 10V150H440' fill='none' stroke='currentColor' opacity='.5'/>"
        f"<path d='M{'L'.join(map(at, sections.front(card)))}' fill='none' stroke='{_BLUE}'/>"
        f"{''.join(dots)}<text x='54' y='19' text-anchor='end'>{sections.show(top)}</text>"
        f"<text x='54' y='154' text-anchor='end'>0</text><text x='420' y='166' "
        f"text-anchor='middle'>{sections.show(most, 4)}</text><text x='240' y='184' "
        f"text-anchor='middle'>cost [{sections.cost_unit(card)}]; orange: this plan</text>"
        "<text x='16' y='80' text-anchor='middle' transform='rotate(-90 16 80)'>goodput "
        "[requests/s]</text></svg>"
    )


def _table(table: Table, *, folded: bool = False) -> str:
    body = Table("", table.columns, table.rows, table.notes)._repr_html_()
    title, body = html.escape(table.title), f"<div class='wide'>{body}</div>"
    if folded:
        return f"<details><summary>{title}</summary>{body}</details>"
    return f"<h3>{title}</h3>{body}"
