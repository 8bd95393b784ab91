"""Time of one transformer layer with random weights, measured on the device at hand."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hetero.catalog import Llm
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError, require
from hetero.files import writing

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Device:
    """What the layer ran on.

    Attributes
    ----------
    device
        Model of the GPU or of the processor.
    driver, torch
        Versions of the driver (of the kernel on a CPU) and of PyTorch.
    dtype
        Data type of weights, activations and KV cache.
    threads
        Threads of the CPU, 0 on a GPU.
    """

    device: str
    driver: str
    torch: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Measured(Shown):
    """Times of one layer over batch sizes and lengths.

    Attributes
    ----------
    frame
        One row per setting: phase, batch [requests], input tokens of each (prefill) or cached
        tokens of each (decode), median time [s], and the spread (interquartile range over
        median).
    skipped
        Settings that did not fit into the memory of the device.
    """

    llm: str
    device: Device
    frame: pd.DataFrame
    skipped: tuple[str, ...]

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the rows, each with device, driver and versions, as :func:`read_csv` reads them."""
        whole = self.frame.assign(model=self.llm, layers=1, **asdict(self.device))
        with writing(path, force=force) as part:
            whole.to_csv(part, index=False, float_format="%.6g", lineterminator="\n")

    def table(self) -> Table:
        """One row per setting."""
        d = self.device
        how = f"{d.device}, driver {d.driver}, PyTorch {d.torch}, {d.dtype}"
        notes = [how + (f", {d.threads} thread(s)" if d.threads else "")]
        if self.skipped:
            notes.append(f"did not fit into memory: {', '.join(self.skipped)}")
        columns = (
            Column("phase"),
            Column("batch", "requests"),
            Column("length", "tokens per request", of=lambda x: x.input_tokens or x.context_tokens),
            Column("one layer", "ms", 4, of=lambda one: 1e3 * one.seconds),
            Column("spread", "%", 2, of=lambda one: 100 * one.spread),
        )
        return Table.of(f"One layer of {self.llm}", columns, self.frame.itertuples(), *notes)


class Layer:
    """A dense decoder layer: attention with rotary positions and grouped heads, gated MLP.

    Weights are random, scaled so that activations stay finite; times do not depend on them.
    """

    def __init__(self, llm: Llm, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        import torch

        require(
            not llm.experts and not llm.latent,
            f"{llm.name} is no dense model with plain attention, the only kind measured here.",
            resolve="measure a dense model, or use hetero.latency.models.moe for this one.",
        )
        self.heads, self.kv_heads, self.head_dim = llm.heads, llm.kv_heads, llm.head_dim
        self.device, self.dtype = device, dtype
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=generator) / columns**0.5
            return values.to(device, dtype)

        hidden, attention = llm.hidden, llm.heads * llm.head_dim
        self.qkv = weight(attention + 2 * llm.kv_heads * llm.head_dim, hidden)
        self.out = weight(hidden, attention)
        self.gate_up = weight(2 * llm.intermediate, hidden)
        self.down = weight(hidden, llm.intermediate)
        self.norms = torch.ones(2, hidden, device=device, dtype=dtype)
        self.hidden = hidden

    def __call__(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Output of the layer, shape of ``x``: (requests, new tokens, hidden).

        Parameters
        ----------
        cache
            Keys and values, each (requests, KV heads, cached tokens + 1, head dimension); the
            last place is for the one new token of each request. None: a whole prompt.
        """
        import torch
        from torch.nn import functional

        b, n, _ = x.shape
        h = functional.rms_norm(x, (self.hidden,), self.norms[0], 1e-6)
        widths = [self.heads, self.kv_heads, self.kv_heads]
        together = functional.linear(h, self.qkv).view(b, n, -1, self.head_dim).transpose(1, 2)
        q, k, v = torch.split(together, widths, dim=1)
        start = 0 if cache is None else cache[0].shape[2] - 1
        q, k = _rotated(q, start), _rotated(k, start)
        if cache is not None:
            cache[0][:, :, -1:], cache[1][:, :, -1:] = k, v
            k, v = cache
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=cache is None, enable_gqa=self.heads != self.kv_heads
        )
        x = x + functional.linear(mixed.transpose(1, 2).reshape(b, n, -1), self.out)
        h = functional.rms_norm(x, (self.hidden,), self.norms[1], 1e-6)
        gate, up = functional.linear(h, self.gate_up).chunk(2, dim=-1)
        result: torch.Tensor = x + functional.linear(functional.silu(gate) * up, self.down)
        return result


def _rotated(x: torch.Tensor, start: int, base: float = 10000.0) -> torch.Tensor:
    """Rotary positions from ``start`` on."""
    import torch

    n, width = x.shape[2], x.shape[3]
    powers = torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width
    places = torch.arange(start, start + n, device=x.device, dtype=torch.float32)
    angle = torch.outer(places, torch.pow(base, -powers))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def measure(
    llm: Llm,
    *,
    device: str = "auto",
    dtype: str = "auto",
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    inputs: Sequence[int] = (128, 512, 2048),
    contexts: Sequence[int] = (128, 1024, 4096),
    repeats: int = 10,
    progress: Callable[[str], None] | None = None,
) -> Measured:
    """Measure one layer: prefills of ``batches`` x ``inputs``, decode steps at ``contexts``.

    Parameters
    ----------
    device
        ``"cuda"``, ``"cpu"``, or ``"auto"``: the first GPU if there is one.
    dtype
        ``"bfloat16"``, ``"float16"``, ``"float32"``, or ``"auto"``: bfloat16 on a GPU, else
        float32.
    repeats
        Timed runs per setting, after two that are not; the median counts.

    Raises
    ------
    InfeasibleError
        If the layer does not fit into the device's memory at any setting.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ParameterError(
            "Measuring a layer needs PyTorch, which is not installed.",
            resolve="install it with `pip install 'hetero[bayes]'`, or your own build of torch.",
        ) from error
    place = _device(device)
    kind = {"auto": "bfloat16" if place.type == "cuda" else "float32"}.get(dtype, dtype)
    require(
        kind in ("bfloat16", "float16", "float32"),
        f"'{dtype}' is no data type of a layer.",
        resolve="use bfloat16, float16, float32 or auto.",
    )
    layer = Layer(llm, place, getattr(torch, kind))
    rows, skipped = [], []
    with torch.inference_mode():
        for phase, batch, length in _settings(batches, inputs, contexts):
            name = f"{phase} of {batch} x {length} tokens"
            if progress:
                progress(name)
            try:
                times = _times(layer, phase, batch, length, repeats)
            except (torch.cuda.OutOfMemoryError, MemoryError):
                skipped.append(name)
                continue
            low, median, high = np.percentile(times, [25, 50, 75])
            prefill, decode = (length, "") if phase == "prefill" else ("", length)
            rows.append((phase, batch, prefill, decode, median, (high - low) / median))
    require(
        bool(rows),
        f"A layer of {llm.name} does not fit into the memory of {place} at any setting.",
        resolve="ask for smaller batches and lengths.",
        error=InfeasibleError,
    )
    frame = pd.DataFrame(
        rows, columns=["phase", "batch", "input_tokens", "context_tokens", "seconds", "spread"]
    )
    return Measured(llm.name, _described(place, kind), frame, tuple(skipped))


def _settings(
    batches: Sequence[int], inputs: Sequence[int], contexts: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    require(
        min([*batches, *inputs, *contexts], default=0) >= 1,
        "Batch sizes and lengths must be positive.",
        resolve="give at least one of each.",
    )
    yield from product(["prefill"], batches, inputs)
    yield from product(["decode"], batches, contexts)


def _times(layer: Layer, phase: str, batch: int, length: int, repeats: int) -> list[float]:
    import torch

    new = length if phase == "prefill" else 1
    kind: dict[str, Any] = {"device": layer.device, "dtype": layer.dtype}
    x = torch.randn(batch, new, layer.hidden, **kind)
    cache = None
    if phase == "decode":
        shape = (batch, layer.kv_heads, length + 1, layer.head_dim)
        cache = (torch.randn(shape, **kind), torch.randn(shape, **kind))
    wait = torch.cuda.synchronize if layer.device.type == "cuda" else lambda: None
    found = []
    for k in range(repeats + 2):
        wait()
        start = time.perf_counter()
        layer(x, cache)
        wait()
        if k >= 2:  # the first runs choose kernels and fill caches
            found.append(time.perf_counter() - start)
    return found


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    require(
        name.startswith("cuda") and torch.cuda.is_available(),
        f"There is no device '{name}' here.",
        resolve="use cpu, or a build of PyTorch for it.",
    )
    return torch.device(name)


def _described(place: torch.device, dtype: str) -> Device:
    import torch

    from hetero.timings import processor

    if place.type == "cpu":
        threads = torch.get_num_threads()
        return Device(processor(), platform.release(), torch.__version__, dtype, threads)
    import subprocess

    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    driver = found.stdout.split("\n")[0].strip() or "unknown"
    return Device(torch.cuda.get_device_name(place), driver, torch.__version__, dtype, 0)
