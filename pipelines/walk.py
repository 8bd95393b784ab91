"""How far one walks through the library: ``python -m pipelines.walk`` follows three ways.

README's fleet file to its card, a trace to the bars of Fig. 5 of Xiong et al. (notebook 04, fewer
requests), and a streamed request through ``hetero serve``, from its arrival to its last word.

A file is entered when one of its functions is first called; imports, other packages and compiled
kernels do not count (compile them in a first run). A folder holds such files; a module at the top,
as ``hetero/question.py``, is one of its own. Files in the order of entry make stays in folders;
*returns*, to a folder already left, are stays less folders. Each way has its own process.
"""

from __future__ import annotations

import io
import re
import signal
import socketserver
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout, suppress
from itertools import groupby
from pathlib import Path
from types import FrameType

from hetero import paths
from hetero.apps.cli import command
from hetero.apps.serving.server import serve
from hetero.display import Column, Table
from pipelines import source

_ASKED = b'{"model": "m", "prompt": "a", "max_tokens": 1, "stream": true}'
_SAID = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 89\r\n\r\n"


class Steps:
    """A profile: (file, function) below ``root`` in the order of first calls, while it counts."""

    def __init__(self, root: Path) -> None:
        self.entered: dict[tuple[str, str], None] = {}
        self.counting, self._importing, self._root = True, 0, f"{root}/"

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """What Python calls at every call and return."""
        code, file = frame.f_code, frame.f_code.co_filename
        if code.co_name == "<module>" and file.endswith(".py"):
            self._importing += (event == "call") - (event == "return")
        ours = self.counting and not self._importing and code.co_flags & 1 and "/site-" not in file
        if ours and event == "call" and file.startswith(self._root) and file != __file__:
            self.entered[file.removeprefix(self._root), code.co_qualname] = None

    def counts(self) -> tuple[int, int, int, int]:
        """Files, folders, functions and returns."""
        files = [Path(file) for file in dict.fromkeys(file for file, _ in self.entered)]
        stays = [at for at, _ in groupby(f if len(f.parts) < 3 else f.parent for f in files)]
        return len(files), len({*stays}), len(self.entered), len(stays) - len({*stays})


def follow(way: Callable[[Steps, Path], None], root: Path | None = None) -> Steps:
    """Walk a way, which is given the steps and a folder to write to."""
    steps = Steps(root or paths.root())
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        sys.setprofile(steps)
        way(steps, Path(folder))
        sys.setprofile(None)
    return steps


def card(_: Steps, folder: Path) -> None:
    """A fleet file to its plan card, by README's command."""
    text = (paths.root() / "README.md").read_text(encoding="utf-8")
    fleet, asked = re.findall(r"```yaml\n(.*?)```.*?\nhetero (plan .*?)\n", text, re.DOTALL)[0]
    (folder / "my_fleet.yaml").write_text(fleet, encoding="utf-8")
    command().main(asked.replace("my_", f"{folder}/my_").split(), standalone_mode=False)


def bar(steps: Steps, _: Path) -> None:
    """A trace to the bars of Fig. 5 of Xiong et al., by the notebook's cells up to there."""
    told, text = dict[str, object](), source.code(source.notebook_path("04_request_scheduling"))
    steps.entered.clear()
    for cell in re.split("(?m)^# %%.*$", text.partition("fig5_completion")[0])[:-1]:
        exec(compile(cell, "<cell>", "exec"), told)
        told |= {"seeds": [0], "requests": 200}


class _Engine(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while self.request.recv(65536):
            self.request.sendall(_HEAD + _SAID + b"data: [DONE]\n\n")


def request(steps: Steps, folder: Path) -> None:
    """A streamed completion, of an engine that says one word."""
    engine, free = (socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Engine) for _ in "ab")
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    free.server_close()
    backend, here = (f"http://127.0.0.1:{one.server_address[1]}" for one in (engine, free))
    text = f"{{model: m, backends: [{{name: one, url: '{backend}', kv_tokens: 9999}}]}}"
    (folder / "deployment.yaml").write_text(text)
    steps.counting, said = False, list[bytes]()

    def client() -> None:
        for _ in range(600):  # until it listens, and the engine is well
            time.sleep(0.2)
            with suppress(OSError):
                steps.counting = bool(urllib.request.urlopen(f"{here}/health").read())
                said.append(urllib.request.urlopen(f"{here}/v1/completions", _ASKED).read())
                break
        time.sleep(0.2)  # what is done after the last word
        steps.counting = False
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=client, daemon=True).start()
    serve(folder / "deployment.yaml", port=free.server_address[1])
    assert said, "there is no answer"


WAYS = {"fleet file to card": card, "trace to bar": bar, "streamed request": request}
if __name__ == "__main__":
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        walks = zip(WAYS, pool.map(follow, WAYS.values()), strict=True)
        rows = tuple((name, *steps.counts()) for name, steps in walks)
    heads = tuple(map(Column, ("way", "files", "folders", "functions", "returns")))
    print(Table("Walks", heads, rows))
