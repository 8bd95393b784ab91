"""Drawing of boxes and arrows as SVG: the same bytes every time, on white paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, TypeAlias

Point: TypeAlias = tuple[float, float]
Kind: TypeAlias = Literal["plain", "plan", "prefill", "decode", "data", "quiet"]

_FILLS: dict[Kind, tuple[str, str]] = {
    "plain": ("#ffffff", "#5d656f"),
    "plan": ("#dbe9f6", "#0072b2"),
    "prefill": ("#fbe6cf", "#d55e00"),
    "decode": ("#d9f0e6", "#009e73"),
    "data": ("#f4e3ee", "#aa4a84"),
    "quiet": ("#eef0f2", "#9aa4b0"),
}
_INK, _SOFT = "#1c1f23", "#5d656f"
_SIZE, _SMALL = 13.0, 11.0
_WIDE = 0.54  # mean width of a letter in heights, of the sans-serif faces that browsers have


@dataclass(frozen=True, slots=True)
class Box:
    """A box that was drawn, with the points where arrows meet it."""

    x: float
    y: float
    width: float
    height: float

    def left(self, at: float = 0.5) -> Point:
        """Point on its left side, ``at`` of the way down."""
        return self.x, self.y + at * self.height

    def right(self, at: float = 0.5) -> Point:
        """Point on its right side."""
        return self.x + self.width, self.y + at * self.height

    def top(self, at: float = 0.5) -> Point:
        """Point on its upper side, ``at`` of the way to the right."""
        return self.x + at * self.width, self.y

    def bottom(self, at: float = 0.5) -> Point:
        """Point on its lower side."""
        return self.x + at * self.width, self.y + self.height


@dataclass(slots=True)
class Sheet:
    """A drawing of ``width`` by ``height`` pixels.

    Examples
    --------
    >>> sheet = Sheet("Two boxes", 300, 80)
    >>> one, other = sheet.box(10, 20, 100, 40, "from"), sheet.box(190, 20, 100, 40, "to")
    >>> sheet.arrow(one.right(), other.left())
    >>> sheet.svg().startswith('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 80"')
    True
    """

    title: str
    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str,
        kind: Kind = "plain",
        *,
        small: str = "",
    ) -> Box:
        """A box with centred lines of text, and smaller ones below them.

        Raises
        ------
        ValueError
            If the text does not fit the box, or the box the sheet.
        """
        if x < 0 or y < 0 or x + width > self.width or y + height > self.height:
            raise ValueError(f"The box '{text}' leaves the sheet '{self.title}'.")
        large, little = text.split("\n"), small.split("\n") if small else []
        need = 1.25 * (_SIZE * len(large) + _SMALL * len(little))
        widest = max(
            [_WIDE * _SIZE * len(one) for one in large]
            + [_WIDE * _SMALL * len(one) for one in little]
        )
        if widest > width - 6 or need > height - 2:
            raise ValueError(f"The text '{text}' does not fit its box of '{self.title}'.")
        fill, edge = _FILLS[kind]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'fill="{fill}" stroke="{edge}" stroke-width="1.3"/>'
        )
        base = y + (height - need) / 2
        for line in large:
            base += 1.25 * _SIZE
            self._text(x + width / 2, base - 0.3 * _SIZE, line, _SIZE, _INK, "middle")
        for line in little:
            base += 1.25 * _SMALL
            self._text(x + width / 2, base - 0.3 * _SMALL, line, _SMALL, _SOFT, "middle")
        return Box(x, y, width, height)

    def frame(self, x: float, y: float, width: float, height: float, text: str) -> Box:
        """A dashed frame around what belongs together, with its name inside at the top."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" '
            f'fill="none" stroke="{_SOFT}" stroke-dasharray="5 4"/>'
        )
        self._text(x + 9, y + 16, text, _SMALL, _SOFT, "start")
        return Box(x, y, width, height)

    def arrow(
        self,
        start: Point,
        end: Point,
        text: str = "",
        *,
        via: Sequence[Point] = (),
        at: Point | None = None,
        dashed: bool = False,
        thick: float = 1.3,
        both: bool = False,
    ) -> None:
        """An arrow, through points on the way if need be; its text stands above its middle."""
        points = " ".join(f"{x:g},{y:g}" for x, y in (start, *via, end))
        style = ' stroke-dasharray="5 4"' if dashed else ""
        head = ' marker-end="url(#head)"' + (' marker-start="url(#tail)"' if both else "")
        self.parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_INK}" '
            f'stroke-width="{thick:g}"{style}{head}/>'
        )
        if text:
            x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 6)
            self.note(x, y, text)

    def line(self, start: Point, end: Point, *, thick: float = 1.3, colour: str = _SOFT) -> None:
        """A line without heads."""
        self.parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" '
            f'stroke="{colour}" stroke-width="{thick:g}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, kind: Kind) -> None:
        """A small box without text."""
        fill, edge = _FILLS[kind]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
            f'fill="{fill}" stroke="{edge}"/>'
        )

    def note(
        self, x: float, y: float, text: str, *, anchor: str = "middle", strong: bool = False
    ) -> None:
        """Lines of small text; ``x, y`` is the base of the first."""
        for k, line in enumerate(text.split("\n")):
            self._text(x, y + 1.25 * _SMALL * k, line, _SMALL, _INK if strong else _SOFT, anchor)

    def svg(self) -> str:
        """The drawing as SVG text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif">'
        )
        marks = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" '
            f'markerHeight="9" markerUnits="userSpaceOnUse" orient="{turn}">'
            f'<path d="M0 1L10 5L0 9z" fill="{_INK}"/></marker>'
            for name, turn in (("head", "auto"), ("tail", "auto-start-reverse"))
        )
        paper = f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" fill="#ffffff"/>'
        body = "\n".join(self.parts)
        title = escape(self.title)
        return f"{head}\n<title>{title}</title>\n<defs>{marks}</defs>\n{paper}\n{body}\n</svg>\n"

    def _text(self, x: float, y: float, text: str, size: float, ink: str, anchor: str) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{ink}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )
