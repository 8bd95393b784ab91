"""Deployments: which replicas serve a model, on which GPUs, for which phase, over which links."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

from hetero.catalog import Gpu
from hetero.display import Column, Shown, Table
from hetero.errors import require, require_not_negative
from hetero.latency.step import StepModel

Batching: TypeAlias = Literal["prefill first", "chunked", "static"]
"""How an engine forms steps.

``"prefill first"``: waiting prompts are prefilled whole before anything decodes on (vLLM's
default in the papers' time). ``"chunked"``: every step takes the decoding requests and fills
its token budget with chunks of prompts (Sarathi, vLLM today). ``"static"``: a padded batch runs
to its end before the next one forms (Algorithm 1 of Xiong et al.); tokens are streamed, so a
short reply is complete before its batch is, but its place stays taken.
"""

Admission: TypeAlias = Literal["known", "predicted", "maximum", "paged"]
"""What KV cache a request must find free before it joins the batch.

``"known"``, ``"predicted"``, ``"maximum"`` reserve its input plus its true, predicted or largest
allowed output; a request that outgrows its reservation gets as much again, or what is left of
the cache, or is evicted where nothing is. ``"paged"`` takes blocks as tokens come, keeps 1 % of
them free when it admits, and evicts the request admitted last when none is left.
"""

Eviction: TypeAlias = Literal["recompute", "swap"]
"""What happens to an evicted request: its cache is computed again, or copied out and back."""

Role: TypeAlias = Literal["both", "prefill", "decode"]
"""Phase that a replica serves."""
_PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Engine:
    """How the serving engine of a replica forms batches and manages its KV cache.

    Source: HeteroServe, section 4.1: eviction penalty of memory that overflows; w_3.

    Attributes
    ----------
    max_batch
        Largest number of requests that decode together.
    max_step_tokens
        Tokens of one prefill step, or the token budget of a chunked step; a single longer
        prompt still goes through.
    max_output_tokens
        Output that ``"maximum"`` admission reserves.
    block_tokens
        Tokens of a KV block (``"paged"``).
    swap_s_per_gb
        Time that moving 10^9 bytes of KV cache out or in holds the replica up [s];
        HeteroServe takes 2.
    prefix_cache
        Whether KV blocks that no request uses any more keep their text until they are taken, the
        longest free first, where a trace names blocks (prefix caching): what a prompt shares with
        blocks in the cache needs no prefill, and no memory where others use them. For ``"paged"``
        admission.
    schedule_ahead
        Whether prompts join a step when the step before it begins, not when that ends
        (asynchronous scheduling, vLLM's default from 0.14 on): what has arrived, and the places and
        memory that have become free, take effect one step later. An idle engine starts at once. For
        ``"chunked"`` batching.
    poll_steps
        Decode steps from one look for new requests to the next (SGLang's
        ``--scheduler-recv-interval``); after a prefill, and while idle, it looks at once.
    free_share
        No prompt joins a step beside decoding requests while less of the cache than this is free
        (``transformers`` keeps 0.15).
    """

    batching: Batching = "prefill first"
    admission: Admission = "known"
    eviction: Eviction = "recompute"
    max_batch: int = 256
    max_step_tokens: int = 8192
    max_output_tokens: int = 2048
    block_tokens: int = 16
    swap_s_per_gb: float = 2.0
    prefix_cache: bool = False
    schedule_ahead: bool = False
    free_share: float = 0.0
    poll_steps: int = 1

    def __post_init__(self) -> None:
        sizes = "max_batch max_step_tokens max_output_tokens block_tokens poll_steps"
        for name in sizes.split():
            require(
                getattr(self, name) >= 1,
                f"Engine {name} must be at least 1; received {getattr(self, name)}.",
                resolve="give a positive number.",
            )
        require_not_negative(swap_s_per_gb=self.swap_s_per_gb)
        require(
            0 <= self.free_share < 1 and not (self.free_share and self.schedule_ahead),
            f"A share of {self.free_share:g} of the cache is to stay free.",
            resolve="give a share from 0 to below 1, and none with schedule_ahead.",
        )
        require(
            self.admission == "paged" or not self.prefix_cache,
            "A prefix cache holds blocks of a paged KV cache; received admission "
            f"'{self.admission}'.",
            resolve="set admission='paged', or prefix_cache=False.",
        )
        static = self.batching == "static"
        require(
            not self.schedule_ahead or (self.batching == "chunked" and self.poll_steps == 1),
            "Steps are scheduled ahead where decoding and prefill share them and the queue is "
            f"seen at each; received batching '{self.batching}', poll_steps={self.poll_steps}.",
            resolve="set batching='chunked' and poll_steps=1, or schedule_ahead=False.",
        )
        require(
            not static or self.admission == "known",
            "Static batching packs by the longest output and needs admission 'known'; "
            f"received '{self.admission}'.",
            resolve="set admission='known', or use another batching.",
        )


@dataclass(frozen=True, slots=True, repr=False)
class Replica(Shown):
    """One copy of the model and the engine that serves it.

    Attributes
    ----------
    step
        Latency contract of the replica.
    kv_tokens
        Capacity of its KV cache [tokens].
    kv_error_tokens
        Deviation to expect of that [tokens].
    kv_bytes_per_token
        Bytes of one cached token: what a transfer or a swap moves.
    lag_s, lag_s_per_token
        Time from the end of a prefill step to the first token, and per token of the prompt: what
        the later stages of a pipeline take after its next prompt has begun [s]. For replicas that
        only prefill.
    precision, kv_precision
        Data types of its weights and cache; empty for those that the plan was asked for.
    network_s
        Way of a request from the dispatcher, and of a token back to it [s]. The dispatcher is taken
        to know what a replica does without that delay.
    gpu, gpus
        Type and number of its GPUs, where known; they give price and colour.
    """

    name: str
    step: StepModel
    kv_tokens: int
    kv_bytes_per_token: float = 0.0
    engine: Engine = Engine()
    role: Role = "both"
    gpu: Gpu | None = None
    gpus: int = 1
    usd_per_h: float | None = None
    lag_s: float = 0.0
    lag_s_per_token: float = 0.0
    network_s: float = 0.0
    precision: str = ""
    kv_precision: str = ""
    kv_error_tokens: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative(network_s=self.network_s, kv_error_tokens=self.kv_error_tokens)
        lagging = self.lag_s > 0 or self.lag_s_per_token > 0
        require(
            min(self.lag_s, self.lag_s_per_token) >= 0 and (not lagging or self.role == "prefill"),
            f"Replica {self.name} serves {self.role} with a lag of {self.lag_s} s and "
            f"{self.lag_s_per_token} s per token.",
            resolve="give a lag of 0 or more to replicas that only prefill, and to no others.",
        )
        least = self.engine.block_tokens if self.engine.admission == "paged" else 1
        require(
            self.kv_tokens >= least and self.kv_bytes_per_token >= 0,
            f"Replica {self.name} has a KV cache of {self.kv_tokens} tokens of "
            f"{self.kv_bytes_per_token} bytes; its engine needs at least {least} tokens.",
            resolve="use more GPUs per replica, a lower precision, or smaller blocks.",
        )
        require(
            self.engine.batching != "static" or self.role == "both",
            f"Replica {self.name} serves only {self.role} in static batches, which hold a "
            "request from its prefill to its last token.",
            resolve="use another batching, or the role 'both'.",
        )

    @property
    def way_s(self) -> float:
        """Way of a request to its steps and of a token back, through network and front end [s]."""
        return 2.0 * self.network_s + self.step.request_s

    def table(self) -> Table:
        """What it stands on, what it holds and how it serves."""
        engine = self.engine
        rows: list[tuple[object, ...]] = [
            ("GPUs", f"{self.gpus} x {self.gpu.name if self.gpu else 'unknown'}", ""),
            ("phase", self.role, ""),
            ("KV cache", self.kv_tokens, "tokens"),
            ("KV cache", self.kv_tokens * self.kv_bytes_per_token / 2**30, "GiB"),
            ("batching", engine.batching, ""),
            ("admission", engine.admission, ""),
            ("largest batch", engine.max_batch, "requests"),
            ("tokens of a step", engine.max_step_tokens, "tokens"),
        ]
        if self.usd_per_h is not None:
            rows.append(("price", self.usd_per_h, "$/h"))
        columns = (Column("of the replica"), Column("value"), Column("unit"))
        return Table(self.name, columns, tuple(rows), (f"Step times: {self.step.source}.",))


@dataclass(frozen=True, slots=True)
class KvLink:
    """Path of the KV cache from a prefill to a decode replica.

    A transfer of n tokens takes latency + n * bytes per token * compression / bandwidth, the part
    over the bandwidth one after the other with all others that take the same media. The prefill
    replica keeps the cache until its transfer ends.

    Attributes
    ----------
    bandwidth_gbs
        Effective bandwidth [10^9 bytes/s].
    compression
        Bytes after over bytes before, 1 for none, 0.25 for 16 to 4 bits.
    media
        At most two names of what a transfer takes for itself, such as the line between two regions
        or the interfaces of two machines; without any, transfers do not slow each other down.
    """

    bandwidth_gbs: float
    latency_s: float = 0.0
    compression: float = 1.0
    media: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            len(self.media) <= 2,
            f"A KV link that takes {', '.join(self.media)} takes too much.",
            resolve="name at most two media, the slowest.",
        )
        require(
            self.bandwidth_gbs > 0 and self.latency_s >= 0 and self.compression > 0,
            f"A KV link needs a bandwidth above 0, received {self.bandwidth_gbs} GB/s, "
            f"{self.latency_s} s, compression {self.compression}.",
            resolve="give a link for every pair of a prefill and a decode replica.",
        )


@dataclass(frozen=True, slots=True, repr=False)
class Deployment(Shown):
    """A flow network of replicas: requests enter at prefill nodes and leave at decode nodes.

    Parameters
    ----------
    replicas
        Nodes; names are unique.
    links
        KV links by (prefill replica, decode replica) name; ``default_link`` serves other pairs.
    """

    name: str
    replicas: tuple[Replica, ...]
    links: tuple[tuple[str, str, KvLink], ...] = ()
    default_link: KvLink | None = None

    def __post_init__(self) -> None:
        names = [replica.name for replica in self.replicas]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(
            bool(names) and not twice,
            f"Deployment {self.name} needs replicas with names of their own; "
            + (f"'{twice[0]}' stands twice." if twice else "it has none."),
            resolve="name each replica once.",
        )
        roles = {replica.role for replica in self.replicas}
        alone = "prefill" if "prefill" in roles else "decode"
        require(
            ("prefill" in roles) == ("decode" in roles),
            f"Deployment {self.name} has replicas that serve only {alone} and none that serve "
            "only the other phase.",
            resolve="add replicas for the other phase, or give them the role 'both'.",
        )
        for start, end, _ in self.links:
            require(
                (self._role(start), self._role(end)) == _PHASES,
                f"A KV link of {self.name} leads from '{start}' to '{end}', which are not "
                "a prefill and a decode replica of it.",
                resolve="name the two replicas, the one that prefills first.",
            )
        if roles >= {"prefill", "decode"} and self.default_link is None:
            known = {(source, target) for source, target, _ in self.links}
            phases = ([one.name for one in self.replicas if one.role == r] for r in _PHASES)
            for source, target in product(*phases):
                require(
                    (source, target) in known,
                    f"No KV link from {source} to {target}.",
                    resolve="give the link, or a default_link for all pairs.",
                )

    def _role(self, name: str) -> Role | None:
        return next((replica.role for replica in self.replicas if replica.name == name), None)

    def table(self) -> Table:
        """One row per replica."""
        columns = (
            Column("replica", of="name"),
            Column("GPUs", of=lambda one: f"{one.gpus} x {one.gpu.name}" if one.gpu else "-"),
            Column("phase", of="role"),
            Column("batching", of="engine.batching"),
            Column("batch limit", "requests", of="engine.max_batch"),
            Column("KV cache", "tokens", of="kv_tokens"),
            Column("latency from", of="step.source"),
        )
        return Table.of(self.name, columns, self.replicas)

    @property
    def usd_per_h(self) -> float | None:
        """Price per hour of all replicas, None if any has no price."""
        prices = [replica.usd_per_h for replica in self.replicas]
        return None if None in prices else sum(price for price in prices if price is not None)
