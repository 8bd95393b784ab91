"""Real Dask and Ray clusters of two worker processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hetero.bench.engines import free_port


@dataclass
class Cluster:
    address: str
    workers: list[subprocess.Popen] = field(default_factory=list)

    def kill_a_worker(self) -> None:
        if self.workers:
            os.killpg(self.workers[0].pid, signal.SIGKILL)
            return
        # Ray starts its workers itself and names them; its agents, named alike, are the node.
        end = time.monotonic() + 600
        while time.monotonic() < end:
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    line = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    if line.startswith(b"ray::PoolActor"):
                        os.kill(int(process.name), signal.SIGKILL)
                        return
            time.sleep(0.05)
        raise AssertionError("no worker of Ray is at work")


@contextlib.contextmanager
def running(kind: str, root: Path, folder: Path) -> Iterator[Cluster]:
    environment = os.environ | {"PYTHONPATH": str(root), "RAY_DISABLE_IMPORT_WARNING": "1"}
    if kind == "dask":
        yield from _dask(root, folder, environment)
    else:
        yield from _ray(root, folder, environment)


def _dask(root: Path, folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
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
            yield Cluster(address, workers)
        finally:
            for process in (*workers, scheduler):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ray(root: Path, folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    ray = str(Path(sys.executable).with_name("ray"))
    port = free_port()
    options = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    subprocess.run(
        [ray, "start", "--head", f"--port={port}", "--object-store-memory=100000000", *options],
        cwd=root,
        env=environment,
        check=True,
        capture_output=True,
        timeout=900,
    )
    try:
        yield Cluster(f"127.0.0.1:{port}")
    finally:
        subprocess.run([ray, "stop", "--force"], capture_output=True, timeout=600, check=False)
