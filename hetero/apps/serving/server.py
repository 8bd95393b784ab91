"""Run the dispatcher as a server until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hetero.apps.serving.settings import load
from hetero.errors import HeteroError, ParameterError

log = logging.getLogger("hetero.apps.serving")


def serve(path: Path | str, *, host: str | None = None, port: int | None = None) -> None:
    """Serve a deployment file until SIGINT or SIGTERM; SIGHUP reads it again.

    Requests under way are finished before the server ends, or goes over to another deployment.
    """
    with packages():
        from hetero.apps.serving.app import App
        from hetero.apps.serving.connections import Connections
        from hetero.apps.serving.dispatcher import Dispatcher, Prepared
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    settings = load(path)
    dispatcher = Dispatcher(Prepared.of(settings))
    at = host or settings.host, port or settings.port

    async def run() -> None:
        loop = asyncio.get_running_loop()
        again, ending, hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def end(*_: Any) -> None:
            loop.call_soon_threadsafe((hurry if ending.is_set() else ending).set)

        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, again.set)

        async def reload() -> None:
            while True:
                await again.wait()
                again.clear()
                try:
                    await dispatcher.change(lambda: load(path))
                except HeteroError as error:
                    log.error("The old deployment stays: %s", error)

        connections = Connections(App(dispatcher).answer, lambda: dispatcher.settings.limits)
        dispatcher.room = connections.room
        await dispatcher.start()
        try:
            listening = await loop.create_server(connections, *at, backlog=2048)
        except OSError as error:
            raise ParameterError(
                f"The address {at[0]}:{at[1]} cannot be bound ({error.strerror}).",
                resolve="choose another with --port, or stop what listens there.",
            ) from None
        reloading = loop.create_task(reload())
        models, names = ", ".join(settings.models), ", ".join(x.name for x in settings.backends)
        said = f"serves {models} with {names}; router {dispatcher.router.name}."
        print(f"http://{at[0]}:{at[1]}/v1 {said}", flush=True)
        gc.collect()
        gc.freeze()  # what is there now stays, and is not looked through again
        await ending.wait()
        listening.close()
        await connections.drain(dispatcher.settings.limits.drain_s, hurry)
        reloading.cancel()
        await dispatcher.stop()

    factory: Any = None
    with suppress(ModuleNotFoundError):
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@contextmanager
def packages() -> Iterator[None]:
    """Say of a package of the server that is missing how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"Serving needs the package {error.name}, which is not installed.",
            resolve="install it with `pip install 'hetero[serving]'`.",
        ) from error
