"""JupyterLab in a headless Chromium, driven as a person would drive it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 600_000  # for whatever comes at once on an idle machine
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

# Chromium's sandbox needs user namespaces, which containers run as root do not have; the other
# switches keep it from looking for its maker's servers.
_SWITCHES = ("--no-sandbox", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run")  # fmt: skip

_CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter(cell => cell.model.type === 'code')
  .map(cell => ({
     id: cell.model.id,
     source: cell.model.sharedModel.getSource(),
     count: cell.model.executionCount,
     outputs: cell.model.outputs.toJSON(),
  }))"""
# Text of the outputs that stands out too little from what is behind it, with its contrast.
_FAINT = """least => {
  const parse = text => {
    const found = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith('color(') ? 255 : 1;
    return [...found.slice(0, 3).map(x => scale * x), found.length > 3 ? found[3] : 1];
  };
  const over = (top, below) => top.slice(0, 3).map((x, k) => top[3] * x + (1 - top[3]) * below[k]);
  const ancestors = node => node ? [node, ...ancestors(node.parentElement)] : [];
  const light = rgb => {
    const linear = rgb.map(x => x / 255).map(
      x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const faint = [];
  for (const area of document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')) {
    for (const node of area.querySelectorAll('*')) {
      const own = node.tagName === 'SELECT' ? [...node.selectedOptions]
        : [...node.childNodes].filter(child => child.nodeType === 3 && child.textContent.trim());
      const box = node.getBoundingClientRect();
      if (!own.length || !box.width || !box.height) continue;
      const chain = ancestors(node), style = getComputedStyle(node);
      const behind = chain.map(one => parse(getComputedStyle(one).backgroundColor)).reverse()
        .reduce((below, one) => over(one, below), [255, 255, 255]);
      const ink = parse(node instanceof SVGElement ? style.fill : style.color);
      ink[3] *= chain.reduce((all, one) => all * Number(getComputedStyle(one).opacity), 1);
      const [a, b] = [light(over(ink, behind)), light(behind)].sort((x, y) => y - x);
      const contrast = (a + 0.05) / (b + 0.05);
      if (contrast < least) faint.push(`${contrast.toFixed(1)}: ${own[0].textContent.trim()}`);
    }
  }
  return [...new Set(faint)];
}"""
# What an output cuts off or scrolls sideways for, and pictures that show what is behind them.
_CUT = """() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')].flatMap(
  area => [area, ...area.querySelectorAll('*')].filter(node => {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    if (!box.width || !box.height || node.closest('svg, mjx-container, .noUi-target')) return false;
    const wide = style.overflowX !== 'visible' && node.scrollWidth > node.clientWidth + 1;
    return wide || box.right > area.getBoundingClientRect().right + 1;
  }).map(node => `${node.tagName} ${node.className}: ${node.textContent.trim().slice(0, 60)}`))"""
_CLEAR = """() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output img')].filter(
  image => {
    const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
    canvas.getContext('2d').drawImage(image, 0, 0);
    const ground = canvas.getContext('2d').getImageData(0, 0, 1, 1).data;
    return Math.min(...ground) < 240;
  }).map(image => image.src.slice(0, 60))"""
# Label and kind of the control of a widget that has the focus.
_FOCUSED = """() => {
  const at = document.activeElement;
  const name = at?.closest('.widget-dropdown, .widget-hslider')?.querySelector('.widget-label');
  const kind = at?.tagName === 'SELECT' ? 'menu' : at?.isContentEditable ? 'number' : 'handle';
  return name ? [name.textContent, kind] : null;
}"""
_KERNEL = (
    "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session?.kernel?.status"
)


def browser() -> str | None:
    """A Chromium of the system, or the one that Playwright has installed; None without."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            own = playwright.chromium.executable_path
        found = own if Path(own).exists() else None
    return found


@dataclass
class Lab:
    """A running JupyterLab and a browser to look at it."""

    url: str
    token: str
    browser: Browser
    shots: Path

    @contextmanager
    def notebook(self, name: str, *, width: int = 1280, height: int = 1400) -> Iterator[Notebook]:
        """A page with one notebook open; its kernel is shut down at the end."""
        page = self.browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(WAIT_MS)
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        try:
            # A workspace of its own, so that no tab of another page is restored.
            space = f"{self.url}/lab/workspaces/{secrets.token_hex(4)}/tree/{name}"
            page.goto(f"{space}?token={self.token}&reset")
            page.wait_for_selector(".jp-Notebook")
            page.wait_for_function(f"({_KERNEL})() === 'idle'")
            opened = Notebook(page, name, self.shots, said)
            yield opened
            opened.shut_down()
        finally:
            page.close()


@dataclass
class Notebook:
    """A notebook that is open in JupyterLab."""

    page: Page
    name: str
    shots: Path
    page_errors: list[str]

    def run_all(self, *, timeout_s: float = 1800.0) -> None:
        """Run > Run All Cells, and wait until every code cell has run.

        The limit leaves time to compile the simulator, which a new checkout has yet to do.
        """
        start = time.monotonic()
        self.page.click('.lm-MenuBar-itemLabel:text-is("Run")')
        self.page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
        while True:
            cells = self.cells()
            waiting = [cell for cell in cells if cell["source"].strip() and not cell["count"]]
            idle = self.page.evaluate(_KERNEL) == "idle"
            # After an error the rest is not run: the error is what to report.
            if idle and (not waiting or any(map(errors_of, cells))):
                return
            if time.monotonic() - start > timeout_s:
                ids = ", ".join(cell["id"] for cell in waiting)
                raise AssertionError(f"{self.name}: not run after {timeout_s:g} s: {ids}")
            self.page.wait_for_timeout(200)

    def cells(self) -> list[dict[str, Any]]:
        """Code cells with their outputs, as the page holds them."""
        found: list[dict[str, Any]] = self.page.evaluate(_CELLS)
        return found

    def errors(self) -> list[str]:
        """Every error output, traceback on stderr, and error of the page itself."""
        return [text for cell in self.cells() for text in errors_of(cell)] + self.page_errors

    def show(self, cell: str) -> None:
        """Scroll a cell to the top of the view."""
        self.page.evaluate(
            """id => { const notebook = window.jupyterapp.shell.currentWidget.content;
                const at = notebook.widgets.findIndex(cell => cell.model.id === id);
                notebook.activeCellIndex = at;
                return notebook.scrollToItem(at, 'start'); }""",
            cell,
        )
        self.page.wait_for_timeout(400)

    def theme(self, name: str) -> None:
        """Settings > Theme, by one of the names of :data:`THEMES`."""
        self.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})",
            THEMES[name],
        )
        self.page.wait_for_selector(f'body[data-jp-theme-name="{THEMES[name]}"]', state="attached")
        self.page.wait_for_timeout(500)

    def faint(self, least: float = 4.5) -> list[str]:
        """Texts among the outputs in view whose contrast is below that of WCAG's level AA."""
        found: list[str] = self.page.evaluate(_FAINT, least)
        return found

    def cut(self) -> list[str]:
        """What is wider than its output, or scrolls sideways in it."""
        found: list[str] = self.page.evaluate(_CUT)
        return found

    def clear(self) -> list[str]:
        """Pictures without a light ground of their own, as a dark theme would hide their text."""
        found: list[str] = self.page.evaluate(_CLEAR)
        return found

    def focused(self) -> list[str] | None:
        """Label of the control that has the focus, and its kind: menu, handle or number."""
        found: list[str] | None = self.page.evaluate(_FOCUSED)
        return found

    def shot(self, name: str) -> Path:
        """Screenshot of what is in view, kept for people to look at."""
        self.shots.mkdir(parents=True, exist_ok=True)
        path = self.shots / f"{name}.png"
        self.page.screenshot(path=path)
        return path

    def shut_down(self) -> None:
        """End the kernel."""
        self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.context.sessionContext.shutdown()"
        )


def errors_of(cell: dict[str, Any]) -> list[str]:
    """Errors among the outputs of a cell, each with the cell's id."""
    found = []
    for output in cell["outputs"]:
        text = output.get("text", "")
        text = "".join(text) if isinstance(text, list) else text
        if output["output_type"] == "error":
            found.append(f"{cell['id']}: {output['ename']}: {output['evalue']}")
        elif output.get("name") == "stderr" and "Traceback" in text:
            found.append(f"{cell['id']}: {text}")
    return found


@contextmanager
def lab(root: Path, home: Path, executable: str, shots: Path) -> Iterator[Lab]:
    """JupyterLab over the notebooks below ``root``, with the settings of a first start."""
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    notices = settings / "notification.jupyterlab-settings"
    notices.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    port, token = _free_port(), secrets.token_hex(16)
    own = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    options = {
        "ServerApp.port": port, "ServerApp.port_retries": 0, "ServerApp.ip": "127.0.0.1",
        "ServerApp.root_dir": root, "IdentityProvider.token": token,
        "LabApp.expose_app_in_browser": True, "LabApp.check_for_updates_class":
        "jupyterlab.NeverCheckForUpdate",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    log = (home / "server.log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *arguments],
        env=os.environ | {name: str(path) for name, path in own.items()},
        cwd=root,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, token, server, home / "server.log")
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=executable, args=list(_SWITCHES), timeout=WAIT_MS
            )
            yield Lab(url, token, chromium, shots)
            chromium.close()
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(url: str, token: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(6000):
        if server.poll() is not None:
            raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=300):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"JupyterLab gave no answer in time:\n{log.read_text()[-3000:]}")
