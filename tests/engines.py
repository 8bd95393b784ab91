"""Real engines for tests: a small Llama with random weights behind an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Engine:
    url: str
    model: str
    process: subprocess.Popen[bytes]


def write_model(folder: Path, *, hidden: int = 256, layers: int = 4) -> None:
    """A Llama with random weights and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # Printable characters and the space, so that every token of an answer is text at once.
    alphabet = [*map(chr, range(33, 127)), "Ġ"]
    special = ["<unk>", "<s>", "</s>"]
    plain = Tokenizer(models.BPE({t: k for k, t in enumerate([*special, *alphabet])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine(folder: Path, *, core: int | None = None, limit_s: float = 120.0) -> Iterator[Engine]:
    """Start `transformers serve` on a folder that `write_model` wrote, and wait until it serves."""
    port = free_port()
    command = [
        *(str(Path(sys.executable).with_name("transformers")), "serve", str(folder)),
        *("--continuous-batching", "--device", "cpu", "--port", str(port)),
        # By default the cache takes most of the machine's memory.
        *("--cb-block-size", "64", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "2048"),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = (folder / f"server-{port}.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(Path(log.name).read_text(errors="replace")[-2000:])
            time.sleep(0.2)
        yield Engine(url, str(folder), process)
    finally:
        process.kill()
        process.wait()
        log.close()
