"""The report in a browser: a section at a time, claims filtered and searched, no network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero import paths
from pipelines.studies import claims

pytestmark = pytest.mark.slow


@pytest.fixture(params=[1280, 390])
def page(chromium: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The committed report in a window of a desktop and of a phone."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = browser.new_page(viewport={"width": request.param, "height": 900})
        asked: list[str] = []
        found.on("request", lambda one: asked.append(one.url))
        found.goto((paths.results() / "report.html").as_uri())
        yield found
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        browser.close()


def _shown(page: Any) -> list[str]:
    rows = page.locator("tr[data-status]").all()
    return [row.get_attribute("id") for row in rows if row.is_visible()]


def test_one_section_is_shown_and_the_page_is_no_wider_than_its_window(page: Any) -> None:
    width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1]
    assert page.locator(".tab.open").count() == 1
    page.goto(page.url.partition("#")[0] + "#paper-helix")
    assert page.locator(".tab.open").get_attribute("id") == "paper-helix"
    assert _shown(page) == [row.claim.id for row in claims.verdicts().of("helix")]


def test_claims_are_searched_and_filtered(page: Any) -> None:
    page.fill("#search", "helix throughput")
    found = _shown(page)
    assert found
    assert all(name.startswith("helix") for name in found)
    assert page.locator("#shown").inner_text() == f"{len(found)} of 314 claims"
    for box in page.locator("input[name=status]").all():
        if box.get_attribute("value") != "reproduced":
            box.uncheck()
    kept = _shown(page)
    statuses = {row.claim.id: row.status for row in claims.verdicts()}
    assert kept == [name for name in found if statuses[name] == "reproduced"]


def test_figures_of_one_source_are_shown_at_a_time(page: Any) -> None:
    page.goto(page.url.partition("#")[0] + "#13_arena")
    assert page.locator("figure.real:visible").count() > 0
    assert page.locator("figure.twin.paired:visible").count() == 0
    page.select_option("#traces", "both")
    assert page.locator("figure.twin.paired:visible").count() > 0
