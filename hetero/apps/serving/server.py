"""Run the dispatcher as a server until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero.apps.serving.settings import DeploymentFile, load
from hetero.errors import HeteroError, ParameterError

log = logging.getLogger("hetero.apps.serving")


def serve(path: Path | str, *, host: str | None = None, port: int | None = None) -> None:
    """Serve a deployment file until SIGINT or SIGTERM; SIGHUP reads it again.

    Requests under way are finished before the server ends, or goes over to another deployment.

    Raises
    ------
    DataError
        If the file cannot be used.
    """
    with packages():
        from hetero.apps.serving.app import Door
        from hetero.apps.serving.dispatcher import Dispatcher, Prepared
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    settings = load(path)
    context = _tls(settings)
    dispatcher = Dispatcher(Prepared.of(settings))
    address = (host or settings.host, port or settings.port)
    door = Door(dispatcher, address, context)

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

        await dispatcher.start()
        await door.open()
        reloading = asyncio.create_task(reload())
        names = ", ".join(backend.name for backend in settings.backends)
        print(
            f"{'https' if context else 'http'}://{address[0]}:{address[1]}/v1 serves "
            f"{', '.join(settings.models)} with {names}; router {dispatcher.router.name}.",
            flush=True,
        )
        gc.collect()
        gc.freeze()  # what is there now stays, and is not looked through again
        await ending.wait()
        await door.close(dispatcher.settings.limits.drain_s, hurry)
        reloading.cancel()
        await dispatcher.stop()

    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
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


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop that is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _tls(settings: DeploymentFile) -> ssl.SSLContext | None:
    """The certificate that is shown, if there is one."""
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = None if settings.tls_key is None else settings.folder / settings.tls_key
    try:
        context.load_cert_chain(settings.folder / settings.tls_cert, key)
    except OSError as error:
        raise ParameterError(
            f"The certificate {settings.tls_cert} and its key cannot be used ({error.strerror}).",
            resolve="give tls_cert and tls_key as files in PEM, without a password.",
        ) from None
    return context
