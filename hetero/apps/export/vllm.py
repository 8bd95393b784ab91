"""``vllm serve`` commands: one per engine and machine, in a script per machine.

Flags and environment variables are those of vLLM 0.33 (``vllm serve --help=all``; its guides
"Parallelism and Scaling" and "NixlConnector"). An engine over several machines starts once on
each, the first machine as head, the others headless.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero.apps.export import read_back
from hetero.apps.export.service import FIRST_PORT, VLLM, ServedEngine, Service
from hetero.catalog import serving_engine
from hetero.errors import ExportError, require
from hetero.naming import one_line

VERSION = VLLM.version
# Plans for vLLM have one GPU type per replica; others may ask it for pipelines over several.
_WRITTEN = replace(VLLM, mixed_pipelines=True)
"""Release of vLLM whose flags these are."""

# Quantised while a 16-bit checkpoint is loaded; other formats come with the checkpoint.
_ONLINE = {"fp8": "fp8", "int8": "int8_per_channel_weight_only"}
_CACHES = {"fp32": "auto", "fp16": "auto", "bf16": "auto", "fp8": "fp8"}
_MASTER_PORT = 29500
_SIDE_PORT = 5600
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
MARK = "Written by hetero export."
"""What marks the files that an export may replace."""
KEY = "VLLM_API_KEY"
"""Environment variable with the key that engines ask of clients; vLLM reads it itself."""
_LISTEN = "$LISTEN"
ROUTER = "vllm_router.sh"
"""Script of the router in front of engines of one phase; no host has an underscore in its name."""
_ROUTER_PORT = 30000
# Weights take their time to load; an engine that died is left out within seconds.
_ROUTED = (
    *("--policy", "power_of_two", "--worker-startup-timeout-secs", "3600"),
    *("--worker-startup-check-interval", "5"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2"),
    *("--cb-timeout-duration-secs", "5"),
)
_ROUTER_HEAD = f"""\
#!/bin/sh
# {MARK}
# vllm-router 0.1.17 has one engine prefill a request and another decode it. It takes the less busy
# of two engines, not the shares of the plan, and sends those of one phase the key in {KEY}
# whoever asks: it listens on this machine only, unless LISTEN says an address.
export OPENAI_API_KEY="${KEY}"
LISTEN=${{LISTEN:-127.0.0.1}}
"""
# Whoever reaches a port without a key may use the engine: only this machine may, then.
_GUARD = f"""\
# Engines ask clients for the key in {KEY}. Where it is not set, they listen on this machine only;
# LISTEN=ADDRESS chooses another address than these two.
if [ -z "${KEY}" ]; then echo "{KEY} is not set: listening on this machine only." >&2; fi
LISTEN=${{LISTEN:-${{{KEY}:+0.0.0.0}}}}
LISTEN=${{LISTEN:-127.0.0.1}}"""


@dataclass(frozen=True, slots=True)
class Command:
    """One process of an engine.

    Attributes
    ----------
    machine
        Where it runs.
    env
        Environment variables that it needs beside those of the machine.
    argv
        Words of the command; it listens where the variable LISTEN of its script says.
    notes
        What vLLM does differently from the plan, one sentence each.
    """

    machine: str
    env: tuple[tuple[str, str], ...]
    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The command as one types it."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env]
        before = (None, *self.argv)
        words = [
            f'"{_LISTEN}"' if last == "--host" else shlex.quote(word)
            for last, word in zip(before, self.argv, strict=False)
        ]
        return " ".join((*env, *words))

    @property
    def words(self) -> tuple[str, ...]:
        """The variables and words that a shell finds in it."""
        return (*(f"{name}={value}" for name, value in self.env), *self.argv)


def commands(service: Service, serving: ServedEngine) -> tuple[Command, ...]:
    """Processes of one engine, its head first.

    Examples
    --------
    >>> from hetero import catalog, cluster
    >>> from hetero.engines import replicated
    >>> llm = catalog.llm("Llama-3-8B")
    >>> plan = replicated(cluster.cluster("xiong-8xv100"), llm, {"v100": (4,)})
    >>> service = Service.of_deployment(plan, llm, weights="meta-llama/Meta-Llama-3-8B")
    >>> print(commands(service, service.servings[0])[0].argv[:5])
    ('vllm', 'serve', 'meta-llama/Meta-Llama-3-8B', '--served-model-name', 'Llama-3-8B')
    """
    check(service, serving)
    machines, hosts = serving.machines, service.hosts
    found = []
    for rank, machine in enumerate(machines):
        parts = serving.on(machine)
        first = parts[0].first_gpu
        devices = ",".join(map(str, range(first, first + sum(part.gpus for part in parts))))
        where = parts[0].platform
        env = [(where.devices if where else "", devices), *environment(service, serving)]
        if serving.phase != "both":
            side = _SIDE_PORT + 100 * (serving.port - FIRST_PORT)
            env += [
                ("VLLM_NIXL_SIDE_CHANNEL_HOST", hosts[machine]),
                ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(side)),
            ]
        argv = ["vllm", "serve", service.model, *arguments(service, serving)]
        if rank == 0:
            argv += ["--host", _LISTEN, "--port", str(serving.port)]
        if len(machines) > 1:
            port = str(_MASTER_PORT + serving.port - FIRST_PORT)
            argv += together(len(machines), str(rank), hosts[machines[0]], port)
            argv += ["--headless"] if rank else []
        found.append(Command(machine, tuple(env), tuple(argv), notes(service, serving)))
    return tuple(found)


def together(nodes: int, rank: str, head: str, port: str = str(_MASTER_PORT)) -> list[str]:
    """Flags that join the processes of one engine on several machines."""
    return [
        *("--nnodes", str(nodes), "--node-rank", rank),
        *("--master-addr", head, "--master-port", port),
    ]


def arguments(service: Service, serving: ServedEngine) -> list[str]:
    """Flags that are the same on every machine of an engine."""
    longest = min(service.llm.max_position, service.longest_tokens or service.llm.max_position)
    precision, kv_precision = types(service, serving)
    argv = ["--served-model-name", service.llm.name]
    tensor, copies = serving.parts[0].degrees
    argv += ["--tensor-parallel-size", str(tensor)]
    if copies > 1:
        argv += ["--data-parallel-size", str(copies)]
    if service.llm.experts and copies > 1:
        argv += ["--enable-expert-parallel"]
    if len(serving.parts) > 1:
        argv += ["--pipeline-parallel-size", str(len(serving.parts))]
    # A checkpoint's own 16 bits, or those that the GPU computes in.
    argv += ["--dtype", "float32" if precision == "fp32" else "auto"]
    if precision in _ONLINE:
        argv += ["--quantization", _ONLINE[precision]]
    if _CACHES[kv_precision] != "auto":
        argv += ["--kv-cache-dtype", _CACHES[kv_precision]]
    argv += ["--gpu-memory-utilization", f"{service.memory_fraction:g}"]
    if serving.sure_tokens is not None:  # a smaller cache than this starts no engine
        longest = min(longest, serving.sure_tokens)
    if serving.engine is not None:
        engine = serving.engine
        # The limits of a group are those of all copies; vLLM counts each on its own.
        argv += ["--max-num-seqs", str(batch := max(1, engine.max_batch // copies))]
        if engine.batching == "chunked":
            # A whole batch that decodes must fit a step.
            budget = max(engine.max_step_tokens // copies, batch)
            argv += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(budget)]
        else:
            # Without chunks a step has to take the longest prompt whole.
            budget = max(engine.max_step_tokens // copies, batch, longest)
            argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(budget)]
        argv += [f"--{'' if engine.prefix_cache else 'no-'}enable-prefix-caching"]
        if service.engine == "vllm" and not engine.schedule_ahead:
            argv += ["--no-async-scheduling"]
    argv += ["--max-model-len", str(longest)]
    if serving.phase != "both":
        transfer = {"kv_connector": connector(service), "kv_role": _ROLES[serving.phase]}
        argv += ["--kv-transfer-config", json.dumps(transfer)]
    return argv


def types(service: Service, serving: ServedEngine) -> tuple[str, str]:
    """Data types of the weights and the cache of an engine."""
    return serving.precision or service.precision, serving.kv_precision or service.kv_precision


def connector(service: Service) -> str:
    """Connector that moves KV caches: pulled by decode engines, pushed by prefill pipelines."""
    piped = any(len(one.parts) > 1 for one in service.servings if one.phase == "prefill")
    return "NixlPushConnector" if piped else "NixlConnector"


def environment(service: Service, serving: ServedEngine) -> list[tuple[str, str]]:
    """Environment variables that are the same on every machine of an engine."""
    layers = [part.layers for part in serving.parts]
    if len(layers) < 2 or not all(layers):
        return []
    return [("VLLM_PP_LAYER_PARTITION", ",".join(map(str, layers)))]


def check(service: Service, serving: ServedEngine) -> None:
    """Refuse an engine that vLLM cannot run."""
    name, llm, engine = serving.name, service.llm, serving.engine
    precision, kv_precision = types(service, serving)
    degree, where = serving.parts[0].degrees[0], serving.parts[0].platform
    if service.engine not in ("vllm", "any"):
        raise ExportError(
            f"The plan of {service.name} is for {serving_engine(service.engine).title}, and these "
            "are files for vLLM.",
            resolve="plan with --engine vllm, or export the routing table.",
        )
    require(
        all(serving.machines),
        f"Island {name} divides its experts over {serving.gpus} GPUs wherever they stand: the "
        "plan names no machines, on which engines would start.",
        resolve="export the routing table, and start the islands as vLLM's guide to expert "
        "parallelism says for your machines.",
        error=ExportError,
    )
    misfit = _WRITTEN.misfit(name, [part.seen for part in serving.parts], serving.phase)
    if misfit is not None:
        raise ExportError(misfit.what, resolve=misfit.resolve)
    others = [one.parts[0] for one in service.servings if one.phase == "decode"]
    apart = [one for one in others if not VLLM.splits(serving.parts[0].seen, one.seen)]
    rules = (
        (
            serving.phase != "prefill" or not apart,
            f"{name} prefills on {serving.parts[0].gpu} what others decode on "
            f"{apart[0].gpu if apart else ''}, and no connector of vLLM moves KV caches there.",
            "plan phases on devices of one vendor.",
        ),
        (
            VLLM.divides(llm, degree),
            f"The {llm.heads} attention heads of {llm.name}, its {llm.kv_heads} KV heads or its "
            f"feed-forward width cannot be divided over the {degree} GPUs of a stage of {name}.",
            "plan with a degree that divides the heads.",
        ),
        (
            where is None or precision in where.weights,
            f"{name} has weights in {precision}, which vLLM does not serve on "
            f"{serving.parts[0].gpu}.",
            f"plan with {' or '.join(where.weights if where else ())} on these GPUs.",
        ),
        (
            kv_precision in _CACHES and (where is None or kv_precision in where.kv_caches),
            f"{name} caches keys and values in {kv_precision}, which vLLM has no flag for on "
            f"{serving.parts[0].gpu}.",
            f"plan with a KV cache in {' or '.join(where.kv_caches if where else _CACHES)}.",
        ),
        (
            engine is None or engine.batching != "static",
            f"{name} serves static batches, and vLLM only batches continuously.",
            "plan with batching 'chunked' or 'prefill first'.",
        ),
    )
    for good, what, resolve in rules:
        require(good, what, resolve=resolve, error=ExportError)


def notes(service: Service, serving: ServedEngine) -> tuple[str, ...]:
    """What vLLM does differently from the plan, or what the plan counts on."""
    precision, _ = types(service, serving)
    kinds = dict.fromkeys(part.gpu for part in serving.parts)
    gpu, where = serving.parts[0].gpu, serving.parts[0].platform
    admission = serving.engine.admission if serving.engine is not None else "paged"
    told = (
        (
            not service.weights,
            f"{service.model} is the catalog's name: name the checkpoint with --weights.",
        ),
        (
            precision in ("int4", "fp4"),
            f"The plan counts on weights in {precision}: name a checkpoint that is quantised so.",
        ),
        (
            len(kinds) > 1,
            f"One engine over {' and '.join(kinds)}: vLLM sizes the KV cache of all stages by the "
            "one that holds least.",
        ),
        (
            where is not None and not where.built_for(gpu),
            f"The image of vLLM {VERSION} is not built for {gpu}: use one of your own.",
        ),
        (
            where is not None and f"v{VERSION}" not in where.image,
            f"On {gpu} vLLM is a plugin with releases of its own: check the flags there.",
        ),
        (
            serving.kv_tokens is not None,
            f"The plan counts on a KV cache of {serving.kv_tokens or 0:,} tokens.",
        ),
        (
            admission != "paged",
            f"The plan admits by the {admission} output; vLLM pages its cache and preempts "
            "instead.",
        ),
        (
            serving.engine is not None and serving.engine.eviction == "swap",
            "The plan swaps evicted caches out; vLLM computes them again.",
        ),
    )
    return tuple(note for holds, note in told if holds)


def router(service: Service, addresses: Mapping[str, str]) -> str:
    """Shell script of a stock router for engines of one phase, those of both behind a second one.

    Source: the routers' command line (``vllm-router --help``, 0.1.17).
    """
    at = [(one.phase, addresses[one.name]) for one in service.servings]
    apart = [word for phase, url in at if phase in _ROLES for word in (f"--{phase}", url)]
    both = [url for phase, url in at if phase == "both"]
    front = ["--worker-urls", f"http://127.0.0.1:{_ROUTER_PORT + 1}", *both]
    front += ["--health-failure-threshold", "1000000"]  # a router is well while any engine is
    found = [*([front] if both else ()), ["--vllm-pd-disaggregation", *apart]]
    started = []
    for k, words in enumerate(found):
        ports = "--port", str(_ROUTER_PORT + k), "--prometheus-port", str(29000 + k)
        argv = ("vllm-router", *_ROUTED, *words, *ports, *(("--host", _LISTEN) if k == 0 else ()))
        started.append(Command("", (), argv))
    lines = [_ROUTER_HEAD, *(f"{one.text} &" for one in started), "wait", ""]
    return read_back.script("\n".join(lines), [one.words for one in started])


def scripts(service: Service) -> dict[str, str]:
    """Shell script by host, which starts the engines of the machine and waits for them."""
    by_machine: dict[str, list[tuple[ServedEngine, Command]]] = {}
    for serving in service.servings:
        for command in commands(service, serving):
            by_machine.setdefault(command.machine, []).append((serving, command))
    found = {}
    for machine, started in by_machine.items():
        host = service.hosts[machine]
        lines = [
            "#!/bin/sh",
            f"# {MARK}",
            f"# Engines of {one_line(service.llm.name)} on machine {one_line(machine)}, for vLLM "
            f"{VERSION}.",
            "# Names of machines are taken as host names."
            + (f" This one's is {host}." if host != machine else ""),
            _GUARD,
        ]
        if any(len(serving.machines) > 1 for serving, _ in started):
            lines += [
                f"# Machines of one engine talk by ports from {_MASTER_PORT} on, which ask for no "
                "key:",
                "# keep them in a network of their own.",
            ]
        if service.disaggregated:
            lines.append(f"# Prefill and decode engines are paired by {ROUTER}.")
        for serving, command in started:
            lines += ["", f"# {one_line(serving.name)}, {serving.phase}"]
            lines += [f"# Note: {one_line(note)}" for note in command.notes]
            lines.append(f"{command.text} &")
        found[host] = read_back.script(
            "\n".join([*lines, "", "wait", ""]), [command.words for _, command in started]
        )
    return found
