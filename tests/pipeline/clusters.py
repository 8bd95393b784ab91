"""Real Dask and Ray clusters of two worker processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hetero.bench.engines import free_port
from tests.serving import wait_until

# Ray's own limits are for machines that have nothing else to do.
RAY = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
}


@dataclass
class Cluster:
    address: str
    head: subprocess.Popen
    workers: list[subprocess.Popen] = field(default_factory=list)

    def kill_a_worker(self) -> None:
        if self.workers:
            os.killpg(self.workers[0].pid, signal.SIGKILL)
        else:
            wait_until(self._kill_an_actor)

    def _kill_an_actor(self) -> bool:
        # Ray starts its workers itself and names them; its agents, named alike, are the node.
        for process in psutil.Process(self.head.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::PoolActor"):
                    process.kill()
                    return True
        return False


@contextlib.contextmanager
def running(kind: str, root: Path, folder: Path) -> Iterator[Cluster]:
    environment = os.environ | {"PYTHONPATH": str(root)} | RAY
    if kind == "dask":
        yield from _dask(root, folder, environment)
    else:
        yield from _ray(root, folder, environment)


def _dask(root: Path, folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    from distributed import Client

    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    common = {"cwd": root, "env": environment, "start_new_session": True}
    scheduled = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
    worked = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-dashboard"]
    with (folder / "dask.log").open("wb") as log:
        common |= {"stdout": log, "stderr": log}
        scheduler = subprocess.Popen(
            [*scheduled, "--host", "127.0.0.1", "--port", str(port)], **common
        )
        workers = [
            subprocess.Popen(
                [*worked, address, "--nthreads", "1", "--local-directory", str(folder)], **common
            )
            for _ in range(2)
        ]
        try:
            with Client(address, timeout=600, set_as_default=False) as client:
                client.wait_for_workers(2, timeout=600)
            yield Cluster(address, scheduler, workers)
        finally:
            for process in (*workers, scheduler):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ray(root: Path, folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    log = folder / "ray.log"
    # A node that has not come up after 30 s gives up, which no setting changes.
    for _ in range(10):
        node = _Node(root, log, environment)
        try:
            if node.started():
                yield Cluster(f"127.0.0.1:{node.port}", node.process)
                return
        finally:
            node.end()
    raise AssertionError(f"Ray did not start:\n{log.read_text()[-3000:]}")


class _Node:
    def __init__(self, root: Path, log: Path, environment: dict[str, str]) -> None:
        self.port, self.log = free_port(), log
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *(f"--port={self.port}", "--num-cpus=2", "--object-store-memory=100000000"),
            *("--include-dashboard=false", "--disable-usage-stats"),
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=root, env=environment, stdout=out, stderr=out
            )

    def started(self) -> bool:
        """Wait until it serves or has given up."""
        wait_until(lambda: self._says_so() or self.process.poll() is not None)
        return self.process.poll() is None

    def _says_so(self) -> bool:
        return "Ray runtime started" in self.log.read_text(errors="replace")

    def end(self) -> None:
        """End it with all that it started, and nothing else that is called Ray."""
        if self.process.poll() is None:
            whole = psutil.Process(self.process.pid)
            for process in (*whole.children(recursive=True), whole):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()
