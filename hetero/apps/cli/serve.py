"""``hetero serve``: the routers of the simulator in front of real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    deployment: Annotated[Path, typer.Argument(help="Deployment file (YAML).")],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; by default this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Make all that is served, but do not listen, and show the file."
        ),
    ] = False,
) -> None:
    """Dispatch requests to OpenAI-compatible engines: vLLM, SGLang, TensorRT-LLM, transformers.

    Serves /v1/completions, /v1/chat/completions, /v1/embeddings, /tokenize, /v1/models,
    /live, /ready, /health and /metrics. SIGHUP reads the file again without dropping a
    request: add or drain engines, change the router. The file names the model, the
    router and the engines, each with address, KV cache and the step model that
    `hetero profile --fit` wrote; without one, its step times are learnt while it serves:

        model: tiny
        router: hetero
        backends:
          - {name: fast, url: "http://127.0.0.1:8001", step: fast.json, kv_tokens: 60000}
          - {name: slow, url: "http://127.0.0.1:8002", step: slow.json, kv_tokens: 20000}
    """
    from hetero.engine.compiled import interpret

    interpret()  # tens of engines are compared in microseconds; a compiler costs seconds and memory
    from hetero.apps.serving.server import packages
    from hetero.apps.serving.server import serve as run
    from hetero.apps.serving.settings import load

    if check:
        settings = load(deployment)
        with packages():
            from hetero.apps.serving.dispatcher import Dispatcher, Prepared
        made = Dispatcher(Prepared.of(settings))  # all that is served, but for an address
        print(settings.deployment().table())
        print(f"Router: {made.router.name}.")
        return
    run(deployment, host=host, port=port)
