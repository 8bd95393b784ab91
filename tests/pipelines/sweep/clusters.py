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

import pytest

from pipelines.bench.engines import free_port
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
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                named = (process / "cmdline").read_bytes().startswith(b"ray::PoolActor")
                if named and os.getpgid(int(process.name)) == self.head.pid:
                    os.kill(int(process.name), signal.SIGKILL)
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
                _end(process)


def _ray(root: Path, folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    log = folder / "ray.log"
    for _ in range(5):
        port = free_port()
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *(f"--port={port}", "--num-cpus=2", "--object-store-memory=100000000"),
            *("--include-dashboard=false", "--disable-usage-stats"),
        ]
        with log.open("wb") as out:
            head = subprocess.Popen(
                command, cwd=root, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        try:
            if _started(head, log):
                yield Cluster(f"127.0.0.1:{port}", head)
                return
        finally:
            _end(head)
        assert "timed out during startup" in log.read_text(), log.read_text()[-3000:]
    pytest.skip(
        "Ray gives a node 30 s to start, which is too short here, and has no setting for it"
    )


def _started(head: subprocess.Popen, log: Path) -> bool:
    """Wait until a node serves or has given up."""
    wait_until(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None)
    return head.poll() is None


def _end(leader: subprocess.Popen) -> None:
    """End a process with all that it started, and nothing else that is called Dask or Ray."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
