"""Processes for tests of the dispatcher: engines without a model, and `hetero serve` itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from hetero.latency import storage
from hetero.latency.step import StepModel
from pipelines.bench.engines import free_port

ROOT = Path(__file__).parents[1]


def wait_until(ready: Any, limit_s: float = 600.0) -> None:
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def get(url: str, key: str = "") -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        return answer.read().decode()


@dataclass
class Process:
    command: list[str]
    url: str
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    before: Callable[[], None] | None = None  # called in the process before its program

    def start(self) -> Process:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | self.environment
        out = None if self.log is None else self.log.open("ab")
        self.process = subprocess.Popen(
            self.command, env=environment, stderr=out, stdout=out, preexec_fn=self.before
        )
        return self

    def _ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def ready(self) -> Process:
        def answers() -> bool:
            assert not self._ended(), "it has ended"
            try:
                get(f"{self.url}/health")
            except urllib.error.HTTPError:
                return True
            return True

        wait_until(answers)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Paced(Process):
    """An engine that streams words at a set pace."""

    def __init__(
        self,
        step_ms: float = 20.0,
        status: int = 0,
        port: int | None = None,
        steps: Path | None = None,
    ) -> None:
        port = port or free_port()
        super().__init__(
            [
                *(sys.executable, "-m", "pipelines.bench.paced", "--port", str(port)),
                *("--step-ms", str(step_ms), "--first-ms", str(step_ms)),
                *(("--steps", str(steps)) if steps else ()),
            ],
            f"http://127.0.0.1:{port}",
            {"HETERO_PACED_STATUS": str(status)},
        )

    def counts(self) -> dict[str, int]:
        return json.loads(get(f"{self.url}/counts"))


class Hostile(Process):
    """An engine that misbehaves as its prompts say.

    Parameters
    ----------
    health
        Where its page of health leads, instead of saying that it is well.
    """

    def __init__(self, health: str = "") -> None:
        port = free_port()
        program = [sys.executable, str(ROOT / "tests/hostile.py"), "--port", str(port)]
        super().__init__([*program, "--health", health], f"http://127.0.0.1:{port}")

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """How often each number was asked for, and answered in full."""
        found = json.loads(get(f"{self.url}/counts"))
        return Counter(found["begun"]), Counter(found["answered"])


class Served(Process):
    """`hetero serve` on a deployment file."""

    key = ""

    def __init__(self, folder: Path, urls: dict[str, str], **settings: Any) -> None:
        self.file = folder / "deployment.yaml"
        step = StepModel.affine(floor_s=0.01, per_token_s=1e-5, per_cached_token_s=1e-8)
        storage.save(step, folder / "step.json", force=True)
        self.write(urls, **settings)
        port = free_port()
        super().__init__(
            [
                *(sys.executable, "-c", "from hetero.apps.cli import main; main()"),
                *("serve", str(self.file), "--port", str(port)),
            ],
            f"http://127.0.0.1:{port}",
            log=folder / "serve.log",
        )

    def write(self, urls: dict[str, str], **settings: Any) -> None:
        drained = settings.pop("drained", ())
        models = settings.pop("models", {})
        text = {"model": "m", "router": "least-requests"} | settings
        text["backends"] = [
            {"name": name, "url": url, "step": "step.json", "kv_tokens": 20_000}
            | {"drain": name in drained}
            | _named(models.get(name))
            for name, url in urls.items()
        ]
        with self.file.open("w") as out:
            YAML(typ="safe", pure=True).dump(text, out)

    def metrics(self) -> dict[str, float]:
        found = {}
        for line in get(f"{self.url}/metrics", self.key).splitlines():
            if match := re.fullmatch(r"(hetero_[^ ]+) ([^ ]+)", line):
                found[match[1]] = float(match[2])
        return found

    def outcomes(self) -> dict[str, int]:
        found = self.metrics()
        return {
            name: int(found[f'hetero_requests_total{{outcome="{name}"}}'])
            for name in ("finished", "failed", "cancelled", "refused")
        }

    def health(self) -> dict[str, Any]:
        try:
            return json.loads(get(f"{self.url}/health"))
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def up(self) -> dict[str, bool]:
        return self.health()["engines"]


def _named(model: str | dict[str, str] | None) -> dict[str, Any]:
    if isinstance(model, dict):
        return {"models": model}
    return {} if model is None else {"model": model}


@contextlib.contextmanager
def running(*processes: Process) -> Iterator[None]:
    """Start processes, wait for all, and end them.

    Dispatchers start last: an engine that does not listen yet is out after their first check.
    """
    dispatchers = [one for one in processes if isinstance(one, Served)]
    engines = [one for one in processes if not isinstance(one, Served)]
    try:
        for together in (engines, dispatchers):
            for one in together:
                one.start()
            for one in together:
                one.ready()
        yield
    finally:
        for one in (*dispatchers, *engines):  # whose checks would else find engines gone
            one.end()
