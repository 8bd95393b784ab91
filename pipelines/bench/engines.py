"""Real engines on this machine: small Llamas with random weights behind ``transformers serve``.

What they say means nothing; what they do is what any engine does: continuous batching over a paged
KV cache, tokens streamed, usage counted. The weights are random because no step takes longer for
better ones, and so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import EndpointError, ParameterError


@dataclass(frozen=True)
class Running:
    """An engine that serves.

    Attributes
    ----------
    url, model
        Where it listens, and the name under which it knows its model.
    """

    url: str
    model: str
    process: subprocess.Popen[bytes]


def write_model(folder: Path, *, hidden: int = 256, layers: int = 4) -> int:
    """Write a Llama with random weights and a tokenizer of bytes; returns its parameters."""
    try:
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"The engine needs the package {error.name}, which is not installed.",
            resolve="install it with `pip install torch 'transformers[serving]'`.",
        ) from error

    # Printable characters and the space, so that every token of an answer is text at once.
    alphabet = [*map(chr, range(33, 127)), "Ġ"]
    special = ["<unk>", "<s>", "</s>"]
    plain = Tokenizer(models.BPE({t: k for k, t in enumerate([*special, *alphabet])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(special) + len(alphabet),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=4096,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():  # special tokens, which are no text, get the logit 0 and lose
        model.get_input_embeddings().weight[: len(special)] = 0.0
    model.generation_config.eos_token_id = None  # so that outputs have the length asked for
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return int(model.num_parameters())


@contextlib.contextmanager
def engine(
    folder: Path,
    *,
    core: int | None = None,
    blocks: int = 256,
    block_tokens: int = 64,
    step_tokens: int = 2048,
    limit_s: float = 600.0,
) -> Iterator[Running]:
    """Start ``transformers serve`` on a folder of :func:`write_model`, and wait until it serves.

    Parameters
    ----------
    core
        Core that it is pinned to; None lets it move.
    blocks, block_tokens
        Its KV cache.
    step_tokens
        Most tokens of a step.

    Raises
    ------
    EndpointError
        If it does not serve within ``limit_s``.
    """
    port = free_port()
    command, own = _command(folder, port, blocks, block_tokens, step_tokens), _environment()
    path = folder / f"server-{port}.log"
    url = f"http://127.0.0.1:{port}"
    with started(command, url, path, core=core, limit_s=limit_s, env=own) as process:
        yield Running(url, str(folder), process)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    url: str,
    log: Path | None = None,
    *,
    core: int | None = None,
    limit_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves at ``url``, pinned to a core where one is given, killed at the end."""
    with contextlib.ExitStack() as ends:
        out = subprocess.DEVNULL if log is None else ends.enter_context(log.open("wb"))
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
        ends.callback(process.wait)
        ends.callback(process.kill)
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {core})
        wait(url, process, log, limit_s)
        yield process


def _command(
    folder: Path, port: int, blocks: int, block_tokens: int, step_tokens: int
) -> list[str]:
    return [
        *(str(Path(sys.executable).with_name("transformers")), "serve", str(folder)),
        *("--continuous-batching", "--device", "cpu", "--port", str(port)),
        # By default the cache takes most of the machine's memory.
        *("--cb-block-size", str(block_tokens), "--cb-num-blocks", str(blocks)),
        *("--cb-max-batch-tokens", str(step_tokens)),
    ]


def _environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def wait(
    url: str, process: subprocess.Popen[bytes], log: Path | None = None, limit_s: float = 60.0
) -> None:
    """Wait until a process answers on ``/health``.

    Raises
    ------
    EndpointError
        If it ends, or does not answer in time; with the end of its log.
    """
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        if process.poll() is not None or time.monotonic() > end:
            text = "" if log is None else log.read_text(errors="replace").strip()[-500:]
            raise EndpointError(
                f"{url} does not answer{f'; its log ends: {text}' if text else ''}.",
                resolve="install hetero[serving], and for real engines transformers[serving].",
            )
        time.sleep(0.1)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    """Write a model, unless its folder holds one, and serve it until stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.bench.engines", description="Serve a small Llama on this machine."
    )
    parser.add_argument("folder", type=Path, help="of the model; written if it is not there")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers (%(default)s)")
    parser.add_argument("--core", type=int, help="core that it is pinned to")
    chosen = parser.parse_args()
    if not (chosen.folder / "config.json").exists():
        write_model(chosen.folder, hidden=chosen.hidden, layers=chosen.layers)
    if chosen.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {chosen.core})
    tokens = 256 * 64
    print(f"Model '{chosen.folder}', KV cache of {tokens:,} tokens.", flush=True)
    command = _command(chosen.folder, chosen.port, 256, 64, 2048)
    os.execve(command[0], command, _environment())


if __name__ == "__main__":
    main()
