"""Time per layer, as Helix measured it: the table that pipelines over layers are planned with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.latency.accuracy import Accuracy
from hetero.latency.frames import derived_frame, raw_frame, replicas
from hetero.latency.reduction import Reduction
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import PHASES, Measurements, Phase

# Helix does not say how many tokens each request had cached when its decode table was measured.
# Its planner counts on requests of 750 + 240 tokens; the mean over their decode is taken.
HELIX_CONTEXT_TOKENS = 870.0
# Nor how long the prompts were: the step of the table is taken, which makes attention negligible.
HELIX_PROMPT_TOKENS = 250.0
HELIX_ENGINE = "Helix prototype 2024"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LayerLatency(Shown):
    """Time of one layer on one node, over prompt tokens and over decoding requests.

    Attributes
    ----------
    prompt_tokens, prompt_ms, decode_requests, decode_ms
        Knots, shapes (P,), (P,), (D,), (D,), increasing. Linear between knots; below the first
        one prompts go down to 0 at 0 tokens and decodes stay level (reading the weights takes the
        same for one request as for two); beyond the last one the last slope goes on.
    gpu, llm, tensor_parallel
        The node: one GPU, or several of one machine that share each layer.

    Examples
    --------
    >>> nodes = {(n.gpu, n.llm, n.tensor_parallel): n for n in layer_latencies()}
    >>> round(float(nodes["L4", "Llama-2-70B", 1].decode_layer_ms(1)), 1)
    6.9
    """

    prompt_tokens: Floats
    prompt_ms: Floats
    decode_requests: Floats
    decode_ms: Floats
    gpu: str
    llm: str
    tensor_parallel: int = 1
    provenance: str = "derived"

    def prompt_layer_ms(self, tokens: ArrayLike) -> Floats:
        """Time [ms] of one layer for prompts of ``tokens`` together."""
        x = np.concatenate([[0.0], self.prompt_tokens])
        return _interpolate(tokens, x, np.concatenate([[0.0], self.prompt_ms]))

    def decode_layer_ms(self, requests: ArrayLike) -> Floats:
        """Time [ms] of one layer for one decode step of ``requests``; 0 for none."""
        b = np.asarray(requests, dtype=np.float64)
        return np.where(b > 0, _interpolate(b, self.decode_requests, self.decode_ms), 0.0)

    def reduce(self, layers: int = 1, context_tokens: float = HELIX_CONTEXT_TOKENS) -> Reduction:
        r"""Step model of a node that holds ``layers`` layers, and its error on the knots.

        Decode times hold both the work per new token and the reading of the cache. The former is
        taken from the prompts, from the time of the smallest decode batch up to the shortest
        prompt, ``token_s(n)``; what remains of a decode at ``b`` requests is spread over its
        ``b * context_tokens`` cached tokens. A mixed step of the step model reads the weights
        once, where Helix adds two layer times that each read them.
        """
        first, shortest = float(self.decode_ms[0]), float(self.prompt_tokens[0])
        knots = np.concatenate([[0.0], self.prompt_tokens])
        times = np.concatenate([[min(first, float(self.prompt_ms[0]))], self.prompt_ms])
        b = np.arange(1, int(self.decode_requests[-1]) + 1, dtype=np.float64)
        rest = self.decode_layer_ms(b) - np.interp(b, knots, times)
        piece = Piece(
            knots,
            layers * times / 1e3,
            layers * np.maximum(rest, 0.0) / 1e3 / (b * context_tokens),
        )
        degree = f" x{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        model = StepModel(
            (piece,),
            source=f"{layers} layer(s) of {self.llm} on {self.gpu}{degree}, {HELIX_ENGINE}",
            provenance=self.provenance,
            max_tokens=float(self.prompt_tokens[-1]),
            max_decoding=float(self.decode_requests[-1]),
        )
        n, d = self.prompt_tokens, self.decode_requests
        accuracy: dict[Phase, Accuracy] = {
            "prefill": Accuracy.of(model.seconds(n), layers * self.prompt_ms / 1e3),
            "decode": Accuracy.of(
                model.seconds(d, d, d * context_tokens), layers * self.decode_ms / 1e3
            ),
        }
        note = (
            f"decode holds at {context_tokens:g} cached tokens per request; steps below "
            f"{shortest:g} tokens are interpolated from the smallest decode batch"
        )
        return Reduction(model, accuracy, note)

    def step_model(
        self, layers: int = 1, context_tokens: float = HELIX_CONTEXT_TOKENS
    ) -> StepModel:
        """Step model of a node that holds ``layers`` layers, see :meth:`reduce`."""
        return self.reduce(layers, context_tokens).model

    def table(self) -> Table:
        """A few points of both curves."""
        n, b = self.prompt_tokens[-1], self.decode_requests[-1]
        rows = tuple(
            (phase, float(x), float(f(x)))
            for phase, points, f in (
                ("prompt tokens", (0.1 * n, 0.5 * n, n), self.prompt_layer_ms),
                ("decoding requests", (1.0, 0.5 * b, b), self.decode_layer_ms),
            )
            for x in points
        )
        degree = f" x{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        columns = (Column("over"), Column("number"), Column("time per layer", "ms", 3))
        title = f"Layer of {self.llm} on {self.gpu}{degree}"
        return Table(title, columns, rows, (f"{self.provenance}: {HELIX_ENGINE}",))


def _interpolate(at: ArrayLike, x: Floats, y: Floats) -> Floats:
    points = np.asarray(at, dtype=np.float64)
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.asarray(np.interp(points, x, y) + slope * np.maximum(points - x[-1], 0.0))


def layer_latencies(*, raw: bool = False) -> tuple[LayerLatency, ...]:
    """Every node type and model of Helix's layer tables (ms, printed to 0.1 or 1 ms)."""
    frame = raw_frame("helix") if raw else derived_frame("helix_layer_knots")
    found = []
    for gpu, llm, degree, _, rows in replicas(frame):
        prompt, decode = (
            rows.loc[rows["phase"] == phase, ["batch_tokens", "ms_per_layer"]]
            .to_numpy(dtype=np.float64)
            .T
            for phase in PHASES
        )
        found.append(
            LayerLatency(
                prompt_tokens=prompt[0],
                prompt_ms=prompt[1],
                decode_requests=decode[0],
                decode_ms=decode[1],
                gpu=gpu,
                llm=llm,
                tensor_parallel=degree,
                provenance="measured" if raw else "derived",
            )
        )
    return tuple(found)


def helix(*, raw: bool = False) -> tuple[Measurements, ...]:
    """LLaMA-30B and Llama-2-70B per layer on A100-40, V100, L4, T4 and multiples (Helix).

    Derived tables are their knots read off every 250 prompt tokens and at the decode batches of
    the published table. Cached lengths and prompt lengths are not published; the readings are
    ``HELIX_CONTEXT_TOKENS`` and ``HELIX_PROMPT_TOKENS``.
    """
    found = []
    for node in layer_latencies(raw=raw):
        n, d = node.prompt_tokens, node.decode_requests
        if not raw:
            n = np.arange(250.0, n[-1] + 1.0, 250.0)
            axis = np.concatenate(
                [
                    np.arange(2.0, 20.0, 2.0),
                    np.arange(20.0, 100.0, 5.0),
                    np.arange(100.0, 801.0, 20.0),
                ]
            )
            d = axis[axis <= d[-1]]
        prompt_ms, decode_ms = node.prompt_layer_ms(n), node.decode_layer_ms(d)
        found.append(
            Measurements(
                decode=np.repeat([False, True], [len(n), len(d)]),
                batch=np.concatenate([n / HELIX_PROMPT_TOKENS, d]),
                length_tokens=np.repeat(
                    [HELIX_PROMPT_TOKENS, HELIX_CONTEXT_TOKENS], [len(n), len(d)]
                ),
                seconds=np.concatenate([prompt_ms, decode_ms]) / 1e3,
                gpu=node.gpu,
                llm=node.llm,
                tensor_parallel=node.tensor_parallel,
                layers=1,
                engine=HELIX_ENGINE,
                source="helix",
                provenance=node.provenance,
                resolution_s=np.concatenate(
                    [np.full(len(n), 1e-3), np.where(d <= 100, 1e-4, 1e-3)]
                ),
            )
        )
    return tuple(found)
