"""Run the dispatcher as a server until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from pathlib import Path

from hetero.apps.serving.settings import DeploymentFile, load
from hetero.errors import HeteroError, ParameterError

log = logging.getLogger("hetero.apps.serving")


def _beside(settings: DeploymentFile, file: Path | None) -> str | None:
    return None if file is None else str(settings.folder / file)


def serve(path: Path | str, *, host: str | None = None, port: int | None = None) -> None:
    """Serve a deployment file until SIGINT or SIGTERM; SIGHUP reads it again.

    Requests under way are finished before the server ends, or goes over to another deployment.

    Raises
    ------
    DataError
        If the file cannot be used.
    ParameterError
        If the packages of the server are missing, or the address cannot be bound.
    """
    try:
        import uvicorn

        from hetero.apps.serving.app import application
        from hetero.apps.serving.connections import Connections, descriptors
        from hetero.apps.serving.dispatcher import Dispatcher, Prepared
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"Serving needs the package {error.name}, which is not installed.",
            resolve="install it with `pip install 'hetero[serving]'`.",
        ) from error
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    settings = load(path)
    dispatcher = Dispatcher(Prepared.of(settings))
    address = (host or settings.host, port or settings.port)
    connections = Connections(lambda: dispatcher.settings.limits, descriptors(settings.limits))
    dispatcher.room = connections.room
    config = uvicorn.Config(
        application(dispatcher),
        host=address[0],
        port=address[1],
        http=connections.protocol(),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=_beside(settings, settings.tls_cert),
        ssl_keyfile=_beside(settings, settings.tls_key),
        timeout_keep_alive=75,  # longer than clients keep theirs
        timeout_graceful_shutdown=max(1, round(settings.limits.drain_s)),
    )

    wanted = asyncio.Event()

    async def reload() -> None:
        while True:
            await wanted.wait()
            wanted.clear()
            try:  # in a thread, so that streams flow on
                new = await asyncio.to_thread(lambda: Prepared.of(load(path)))
            except HeteroError as error:
                log.error("The old deployment stays: %s", error)
            else:
                dispatcher.reload(new)

    async def run() -> None:
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, wanted.set)
        beside = [asyncio.create_task(one) for one in (reload(), connections.watch())]
        gc.collect()
        gc.freeze()  # what is there now stays, and is not looked through again
        await uvicorn.Server(config).serve()
        for one in beside:
            one.cancel()

    names = ", ".join(backend.name for backend in settings.backends)
    scheme = "https" if settings.tls_cert else "http"
    print(
        f"{scheme}://{address[0]}:{address[1]}/v1 serves {settings.model} with {names}; "
        f"router {dispatcher.router.name}.",
        flush=True,
    )
    try:
        # The fastest event loop that is installed.
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(run())
    except SystemExit:
        raise ParameterError(
            f"The address {address[0]}:{address[1]} cannot be bound.",
            resolve="choose another with --port, or stop what listens there.",
        ) from None
