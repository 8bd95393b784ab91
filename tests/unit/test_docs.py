from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from hetero import paths
from hetero.coverage import DRAWINGS, figures
from pipelines.docs.diagrams import DIAGRAMS, drawings
from pipelines.docs.sheet import Sheet


def test_every_diagram_of_the_papers_is_redrawn():
    assert set(DIAGRAMS) == {figure.key for figure in figures() if figure.kind == "diagram"}


def test_the_drawings_in_the_checkout_are_those_that_the_code_draws():
    folder = paths.root() / DRAWINGS
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert found == drawings(), "python -m pipelines.docs.diagrams writes them"


@pytest.mark.parametrize("name", list(DIAGRAMS))
def test_what_is_drawn_stays_on_its_sheet(name):
    sheet = DIAGRAMS[name]()
    root = ET.fromstring(sheet.svg())
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title").text == sheet.title
    texts = root.findall(f"{space}text")
    assert len(texts) > 5
    for text in texts:
        x, y = float(text.get("x")), float(text.get("y"))
        half = 0.27 * float(text.get("font-size")) * len(text.text)
        # From the middle, or from the left.
        low, high = (
            (x - half, x + half) if text.get("text-anchor") == "middle" else (x, x + 2 * half)
        )
        assert low >= 0, text.text
        assert high <= sheet.width, text.text
        assert 8 <= y <= sheet.height - 2, text.text
    boxes = [
        tuple(float(one.get(k)) for k in ("x", "y", "width", "height"))
        for one in root.findall(f"{space}rect")
        if one.get("x") and one.get("stroke-dasharray") is None and one.get("rx") == "5"
    ]
    for k, (x, y, w, h) in enumerate(boxes):
        for u, v, m, n in boxes[k + 1 :]:
            assert x + w <= u or u + m <= x or y + h <= v or v + n <= y


def test_text_that_does_not_fit_is_refused():
    sheet = Sheet("test", 200, 100)
    with pytest.raises(ValueError, match="does not fit"):
        sheet.box(0, 0, 40, 30, "much too long for it")
    with pytest.raises(ValueError, match="leaves the sheet"):
        sheet.box(150, 0, 60, 30, "x")
