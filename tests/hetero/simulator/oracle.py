"""A slow simulator to compare with: one object per request, every step simulated by itself.

It is written from the rules in the docstrings of the library and shares no code with its kernels.
Everything happens at instants; at one instant the order is: steps and KV transfers end, replicas
fail, recover or begin to drain, requests arrive, batches form.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero.deployment import Deployment, KvLink, Replica
from hetero.latency.step import Bends, StepModel
from hetero.simulator import Event
from hetero.workload import Trace

TOO_LONG, NO_REPLICA, REFUSED, DEFERRED = "too long", "no replica", "refused", "deferred"


def step_seconds(step: StepModel, n: int, b: int, cached: float, pairs: float) -> float:
    """Time of one step, from the definition of the step model."""
    times = []
    for piece in step.pieces:
        x, y = piece.knots_tokens.tolist(), piece.knots_s.tolist()
        if n <= x[0] or len(x) == 1:
            base = y[0]
        else:
            k = 0
            while k < len(x) - 2 and n >= x[k + 1]:
                k += 1
            base = y[k] + (y[k + 1] - y[k]) / (x[k + 1] - x[k]) * (n - x[k])
        at = min(max(b, 1), len(piece.per_cached_token_s)) - 1
        rate = float(piece.per_cached_token_s[at])
        if piece.mixed is not None and n > b > 0:
            rate = float(piece.mixed.per_cached_token_s[at])
            base += float(piece.mixed.level_s[at]) + float(piece.mixed.per_token_s[at]) * (n - b)
        if piece.decode_level_s is not None and b > 0 and n <= b:
            base += float(piece.decode_level_s[at])
        if piece.bends is not None and b > 0 and n <= b:
            base += bend_seconds(piece.bends, at + 1, cached)
        times.append(base + rate * cached + piece.per_pair_s * pairs)
    return max(times)


def bend_seconds(bends: Bends, b: int, cached: float) -> float:
    """Extra time of a decode step: linear in the cached tokens between the bends."""
    x = [b * context for context in bends.context_tokens.tolist()]
    y = bends.extra_s[b - 1].tolist()
    if cached <= x[0]:
        return float(y[0])
    for k in range(len(x) - 1):
        if cached < x[k + 1]:
            return float(y[k] + (y[k + 1] - y[k]) / (x[k + 1] - x[k]) * (cached - x[k]))
    return float(y[-1])


@dataclass(eq=False)
class Block:
    """A KV block of a replica that caches prefixes."""

    name: tuple[int, int] | None = None
    users: int = 0


class Pool:
    """All KV blocks of a replica, one object each; the free ones in the order of their taking."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free: dict[Block, None] = dict.fromkeys(Block() for _ in range(count))
        self.named: dict[tuple[int, int], Block] = {}

    @property
    def used(self) -> int:
        return self.count - len(self.free)

    def new(self) -> Block:
        block = next(iter(self.free))
        del self.free[block]
        if block.name is not None:
            del self.named[block.name]
        block.name, block.users = None, 1
        return block

    def share(self, block: Block) -> Block:
        self.free.pop(block, None)
        block.users += 1
        return block

    def release(self, job: Job) -> None:
        while job.blocks:
            block = job.blocks.pop()
            block.users -= 1
            if block.users == 0:
                self.free[block] = None


@dataclass(eq=False)
class Job:
    """A request and all that happens to it."""

    index: int
    arrival: float
    inputs: int
    outputs: int
    predicted: int
    priority: int = 0
    chain: tuple[int, ...] = ()  # prefix blocks
    hit: int = 0
    done: int = 0
    reserved: int = 0  # tokens, where an engine reserves
    blocks: list[Block] = field(default_factory=list)  # where prefixes are cached
    at_hand: bool = False
    swapped: bool = False
    first: float = math.nan
    last: float = math.nan
    finish: float = math.nan
    tokens: int = 0
    node: Node | None = None
    target: Node | None = None
    transfer: float = 0.0
    transfer_end: float = math.nan
    preemptions: int = 0
    retries: int = 0
    reason: str = ""

    @property
    def held(self) -> int:
        return self.inputs + self.done

    @property
    def stored(self) -> int:
        """Tokens in the KV cache while it decodes: the newest one is not stored yet."""
        return self.inputs + self.done - 1


@dataclass(eq=False)
class Next:
    """A step that was put together while the one before it was about to run."""

    tokens: int = 0
    pairs: float = 0.0
    prompts: list[Job] = field(default_factory=list)  # whose last chunk it prefills
    back: list[Job] = field(default_factory=list)  # that decode on with a cache at hand

    @property
    def empty(self) -> bool:
        return not (self.tokens or self.prompts or self.back)


@dataclass(eq=False)
class Node:
    """One replica."""

    index: int
    spec: Replica
    prefix_tokens: int = 0  # of a prefix block of the trace
    pool: Pool | None = None
    up: bool = True
    draining: bool = False
    queue: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)  # in the order in which they joined
    partial: Job | None = None
    chunked: int = 0  # tokens of the partial prompt that are prefilled
    ahead: Next = field(default_factory=Next)
    unseen: int = 0  # at the end of the queue, come since it last looked
    since: int = 0  # decode steps since then
    leaving: list[Job] = field(default_factory=list)
    places: list[Job] = field(default_factory=list)  # of the static batch
    padding: int = 0  # cached tokens per place of the static batch
    stall: float = 0.0
    begun: float = 0.0
    end: float | None = None  # of the step in progress
    prompts: list[Job] = field(default_factory=list)  # whose prefill ends with this step
    chunk: int = 0
    decodes: bool = False
    fed: int = 0
    busy: float = 0.0
    prefilled: int = 0
    decoded: int = 0
    outstanding: int = 0
    outstanding_tokens: int = 0

    @property
    def open(self) -> bool:
        return self.up and not self.draining

    @property
    def paged(self) -> bool:
        return self.spec.engine.admission == "paged"

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.spec.engine.block_tokens)

    def empty(self) -> None:
        """Begin with an empty prefix cache, where the engine has one."""
        engine = self.spec.engine
        if engine.prefix_cache and self.prefix_tokens and self.spec.role != "decode":
            self.pool = Pool(self.spec.kv_tokens // engine.block_tokens)

    def names(self, job: Job, tokens: int) -> list[tuple[int, int]]:
        """Names of the full blocks among the first tokens of a prompt, each by where it ends."""
        size, per = self.spec.engine.block_tokens, self.prefix_tokens
        full = min(tokens, job.inputs, len(job.chain) * per) // size
        return [(job.chain[((k + 1) * size - 1) // per], k) for k in range(full)]

    def cached(self, job: Job) -> list[Block]:
        """Blocks at the start of the prompt that are cached; one token is left to prefill."""
        found: list[Block] = []
        if self.pool is None or job.at_hand or job.swapped:
            return found
        for name in self.names(job, job.held - 1):
            if name not in self.pool.named:
                break
            found.append(self.pool.named[name])
        return found

    def enlist(self, job: Job, tokens: int) -> None:
        """The first tokens of a prompt are being computed: their blocks may be found from now."""
        if self.pool is None:
            return
        for k, name in enumerate(self.names(job, tokens)):
            if job.blocks[k].name == name:
                continue
            if name in self.pool.named:
                break
            job.blocks[k].name = name
            self.pool.named[name] = job.blocks[k]

    def resize(self, job: Job, count: int) -> None:
        """Take blocks for a request until it has so many."""
        while self.pool is not None and len(job.blocks) < count:
            job.blocks.append(self.pool.new())

    def release(self, job: Job) -> None:
        job.reserved = 0
        if self.pool is not None:
            self.pool.release(job)

    @property
    def capacity(self) -> int:
        """Tokens, or blocks where the engine pages."""
        tokens = self.spec.kv_tokens
        return tokens // self.spec.engine.block_tokens if self.paged else tokens

    @property
    def usable_tokens(self) -> int:
        return self.capacity * (self.spec.engine.block_tokens if self.paged else 1)

    @property
    def used(self) -> int:
        if self.pool is not None:
            return self.pool.used
        whole = [*self.prompts, *self.leaving, *([self.partial] if self.partial else [])]
        whole += [*self.ahead.prompts]
        if not self.paged:
            held = {id(job): job.reserved for job in [*whole, *self.running, *self.ahead.back]}
            return sum(held.values())
        # A prompt takes the blocks of all of it at once.
        prompts = sum(self.blocks(job.held - (job in self.leaving)) for job in whole)
        return prompts + sum(self.blocks(job.stored) for job in [*self.running, *self.ahead.back])

    @property
    def growth(self) -> int:
        """Blocks that the next decode step allocates."""
        return sum(self.blocks(job.stored + 1) - self.blocks(job.stored) for job in self.running)

    def expected(self, job: Job) -> int:
        rule = self.spec.engine.admission
        if rule == "known":
            return max(job.outputs, 1)
        if rule == "predicted":
            return job.predicted
        return max(job.outputs, self.spec.engine.max_output_tokens, 1)

    def fits(self, job: Job) -> bool:
        if self.spec.role == "prefill":
            return job.held + 1 <= self.usable_tokens
        return job.inputs + job.outputs <= self.usable_tokens

    def need(self, job: Job) -> int:
        if self.spec.role == "prefill":
            return min(job.held + 1, self.capacity)
        ahead = self.expected(job)
        if ahead > job.done:
            ahead -= job.done
        return min(job.held + ahead, self.capacity)

    def has_room(self, job: Job) -> bool:
        used = self.used
        if not self.paged:
            return used + self.need(job) <= self.capacity
        spare = 0 if used == 0 else max(int(0.01 * self.capacity), self.growth)
        shared = sum(block.users > 0 for block in self.cached(job))
        return used + self.blocks(job.held) - shared + spare <= self.capacity

    def admit(self) -> Job:
        job = self.queue.popleft()
        if not self.paged:
            job.reserved = self.need(job)
        if self.pool is not None:
            job.blocks = [self.pool.share(block) for block in self.cached(job)]
        self.resize(job, self.blocks(job.stored if job.at_hand or job.swapped else job.held))
        return job

    def evict(self, job: Job) -> None:
        self.running.remove(job)
        job.preemptions += 1
        self.release(job)
        if self.spec.engine.eviction == "swap":
            job.swapped = True
            self.stall += self.swap_seconds(job)
        self.put(job, front=True)

    def put(self, job: Job, *, front: bool = False) -> None:
        """Queue behind (or before) those of the same priority; smaller numbers go first."""
        earlier = [
            one.priority < job.priority or (one.priority == job.priority and not front)
            for one in self.queue
        ]
        self.queue.insert(sum(earlier), job)
        self.unseen += not front

    def swap_seconds(self, job: Job) -> float:
        per_token = self.spec.engine.swap_s_per_gb * self.spec.kv_bytes_per_token / 1e9
        return per_token * job.stored

    def make_room(self) -> bool:
        evicted = False
        while self.paged and self.running and self.used + self.growth > self.capacity:
            lowest = max(job.priority for job in self.running)
            self.evict([job for job in self.running if job.priority == lowest][-1])
            evicted = True
        return evicted

    def form(self, now: float) -> None:
        """Choose the next step, at a boundary."""
        if not self.up or self.end is not None:
            return
        if self.spec.engine.batching == "static":
            self.form_static(now)
            return
        engine = self.spec.engine
        if engine.schedule_ahead:
            self.form_ahead(now)
            return
        if not self.running or self.since in (0, engine.poll_steps):
            self.unseen = self.since = 0
        chunking = engine.batching == "chunked"
        evicted = chunking and self.make_room()
        budget = engine.max_step_tokens - (len(self.running) if chunking else 0)
        tokens, pairs = 0, 0.0
        joining = 0
        if self.partial:
            joining = 1
            q = min(self.partial.held - self.chunked, budget)
            if q > 0:
                tokens, pairs = q, q * (self.chunked + q / 2)
                self.chunk = q
                self.enlist(self.partial, self.chunked + q)
                if self.chunked + q == self.partial.held:
                    self.prompts.append(self.partial)
                    self.partial, self.chunked, self.chunk = None, 0, 0
        free = self.capacity - self.used
        scarce = bool(self.running) and free < engine.free_share * self.capacity
        while len(self.queue) > self.unseen and not (self.partial or evicted or scarce):
            job = self.queue[0]
            if len(self.running) + joining >= engine.max_batch or not self.has_room(job):
                break
            left = budget - tokens
            if job.at_hand or job.swapped:
                if chunking and left < 1:
                    break
                self.admit()
                if job.swapped:
                    self.stall += self.swap_seconds(job)
                job.at_hand = job.swapped = False
                self.running.append(job)
                if chunking:
                    budget -= 1
                continue
            if chunking and left < 1:
                break
            hit = len(self.cached(job)) * engine.block_tokens
            new = job.held - hit
            if not chunking and tokens and new > left:
                break
            self.admit()
            job.hit = hit
            joining += 1
            q = min(new, left) if chunking else new
            self.enlist(job, hit + q)
            tokens += q
            pairs += q * (hit + q / 2)
            if q < new:
                self.partial, self.chunked, self.chunk = job, hit, q
            else:
                self.prompts.append(job)
        if tokens:
            self.decodes = chunking and bool(self.running)
            self.begin(now, tokens, pairs)
            return
        if not chunking:
            self.make_room()
        if self.running:
            self.decodes = True
            self.begin(now, 0, 0.0)

    def form_ahead(self, now: float) -> None:
        """Run the step that was decided on one step ago, and decide on the one after it."""
        current = self.due(now)
        if not current.tokens and not self.running:
            current = self.due(now)
        if current.tokens or self.running:
            self.decodes = bool(self.running)
            self.begin(now, current.tokens, current.pairs)

    def due(self, now: float) -> Next:
        current, self.ahead = self.ahead, Next()
        for job in current.back:
            if job.swapped:
                self.stall += self.swap_seconds(job)
            job.at_hand = job.swapped = False
            self.running.append(job)
        self.prompts += current.prompts
        evicted = self.make_room()
        following, engine = self.ahead, self.spec.engine
        # Each of them is taken to decode in the next step.
        left = engine.max_step_tokens - len(self.running) - len(self.prompts)
        if self.partial and left > 0:
            self.feed(following, self.partial, self.chunked, left)
            left = max(left - following.tokens, 0)
        while self.queue and left > 0 and not self.partial and not evicted:
            job = self.queue[0]
            places = [self.running, self.prompts, following.prompts, following.back]
            if sum(map(len, places)) >= engine.max_batch or not self.has_room(job):
                break
            hit = len(self.cached(job)) * engine.block_tokens
            self.admit()
            if job.at_hand or job.swapped:
                following.back.append(job)
                left -= 1
                continue
            job.hit = hit
            before = following.tokens
            self.feed(following, job, job.hit, left)
            left -= following.tokens - before
        return current

    def feed(self, step: Next, job: Job, start: int, most: int) -> None:
        """Give a prompt, prefilled up to ``start``, at most so many tokens of a step."""
        q = min(job.held - start, most)
        step.tokens += q
        step.pairs += q * (start + q / 2)
        self.enlist(job, start + q)
        whole = start + q == job.held
        self.partial, self.chunked = (None, 0) if whole else (job, start + q)
        if whole:
            step.prompts.append(job)

    def begin(self, now: float, tokens: int, pairs: float) -> None:
        assert self.used <= self.capacity, "KV cache exceeded"
        b = len(self.running) if self.decodes else 0
        assert not b or not self.paged or self.used + self.growth <= self.capacity
        cached = sum(job.held for job in self.running) if self.decodes else 0
        self.fed = tokens
        self.begun = now
        self.end = now + self.stall + step_seconds(self.spec.step, tokens + b, b, cached, pairs)
        self.stall = 0.0

    def form_static(self, now: float) -> None:
        self.begun = now
        if self.running:
            b = len(self.places)
            self.decodes = True
            self.end = now + step_seconds(self.spec.step, b, b, b * self.padding, 0.0)
            return
        batch: list[Job] = []
        while self.queue and len(batch) < self.spec.engine.max_batch:
            trial = [*batch, self.queue[0]]
            longest = max(job.outputs - job.done for job in trial)
            size = sum(job.held for job in trial) + len(trial) * longest
            if batch and size > self.capacity:
                break
            batch.append(self.queue.popleft())
        if batch:
            longest = max(job.held for job in batch)
            tokens = len(batch) * longest
            self.places, self.prompts, self.padding = batch, list(batch), longest + 1
            self.fed = sum(job.held for job in batch)
            pairs = tokens * longest / 2
            self.end = now + step_seconds(self.spec.step, tokens, 0, 0.0, pairs)


class Fleet:
    """All replicas, the dispatcher in front of them, and the clock."""

    def __init__(
        self,
        deployment: Deployment,
        trace: Trace,
        policy: str,
        *,
        predicted: Sequence[int] | None = None,
        events: Sequence[Event] = (),
        pairs: Sequence[tuple[int, int, float]] = (),
    ) -> None:
        self.pairs, self.credits = pairs, [0.0] * len(pairs)
        self.nodes = [
            Node(k, replica, trace.block_tokens) for k, replica in enumerate(deployment.replicas)
        ]
        for node in self.nodes:
            node.empty()
        self.by_name = {node.spec.name: node for node in self.nodes}
        self.links = {(a, b): link for a, b, link in deployment.links}
        self.default_link = deployment.default_link
        self.policy, self.turn = policy, 0
        outputs = trace.output_tokens.tolist()
        guesses = [max(o, 1) for o in outputs] if predicted is None else predicted
        self.jobs = [
            Job(k, t, i, o, p, c)
            for k, (t, i, o, p, c) in enumerate(
                zip(
                    trace.arrival_s.tolist(),
                    trace.input_tokens.tolist(),
                    outputs,
                    guesses,
                    [0] * len(trace) if trace.priorities is None else trace.priorities.tolist(),
                    strict=True,
                )
            )
        ]
        if trace.prefix_ids is not None and trace.prefix_offsets is not None:
            ids, offsets = trace.prefix_ids.tolist(), trace.prefix_offsets.tolist()
            for job in self.jobs:
                job.chain = tuple(ids[offsets[job.index] : offsets[job.index + 1]])
        self.events = sorted(events, key=lambda event: event.time_s)
        self.transfers: list[Job] = []
        self.held: list[Job] = []  # at the dispatcher; reason DEFERRED or NO_REPLICA
        self.changed = False  # whether a request got its first or last token at this instant
        self.gaps: list[float] = []
        self.clients, self.think = trace.clients, trace.think_s
        self.ready = [0.0] * trace.clients  # when clients that wait for nothing send a request
        self.now = 0.0

    def due(self, job: Job) -> float:
        """When the next request comes; infinite while all clients wait."""
        return min(self.ready, default=math.inf) if self.clients else job.arrival

    def run(self) -> Fleet:
        """Play everything."""
        arrivals, events = deque(self.jobs), deque(self.events)
        while True:
            times = [node.end for node in self.nodes if node.end is not None]
            times += [job.transfer_end for job in self.transfers]
            times += [self.due(arrivals[0])] if arrivals else []
            times += [events[0].time_s] if events else []
            if not times:
                return self
            if min(times) == math.inf:
                # Every client waits for a request that is held for good.
                self.ready = [self.now + self.think] * self.clients
                self.held.clear()
                continue
            self.changed = False
            self.now = now = min(times)
            for node in self.nodes:
                if node.end == now:
                    self.end_step(node, now)
            self.end_transfers(now)
            if self.changed:
                self.offer(DEFERRED)
            eventful = False
            while events and events[0].time_s == now:
                event = events.popleft()
                if event.what == "fail":
                    self.fail(self.by_name[event.replica], now)
                elif event.what == "drain":
                    self.by_name[event.replica].draining = True
                else:
                    self.by_name[event.replica].up = True
                    self.by_name[event.replica].draining = False
                eventful = True
            if eventful:
                self.offer(DEFERRED, NO_REPLICA)
            while arrivals and self.due(arrivals[0]) == now:
                job = arrivals.popleft()
                if self.clients:
                    self.ready.remove(now)
                    job.arrival = now
                self.route(job)
            for node in self.nodes:
                node.form(now)

    # The life of a request -----------------------------------------------------------------

    def token(self, job: Job, now: float) -> None:
        """The request gets its next token."""
        if job.done == 0:
            job.first = now
            self.changed = True
        else:
            self.gaps.append(now - job.last)
        job.last = now
        job.done += 1
        job.tokens += 1

    def end_step(self, node: Node, now: float) -> None:
        node.busy += now - node.begun
        node.end = None
        if node.decodes:
            node.decodes = False
            for job in node.running:
                self.token(job, now)
                node.resize(job, node.blocks(job.stored))
            node.decoded += len(node.running)
            node.padding += 1
            node.since += 1
        if node.partial:
            node.chunked += node.chunk
            node.chunk = 0
        node.prefilled += node.fed
        node.since = 0 if node.fed else node.since
        node.fed = 0
        prompts, node.prompts = node.prompts, []
        for job in prompts:
            later = now + (node.spec.lag_s + node.spec.lag_s_per_token * job.held)
            if job.outputs == 0:
                job.first = later
            else:
                self.token(job, later)
            if job.done >= job.outputs:
                self.finish(node, job, later)
                if node.spec.role == "prefill":  # its decode replica need not wait for it
                    assert job.target is not None
                    self.release(job.target, job)
                    job.target = None
            elif node.spec.role == "prefill":
                self.release(node, job)
                self.send_cache(node, job, later)
            else:
                node.running.append(job)
        self.leave(node, now)

    def leave(self, node: Node, now: float) -> None:
        """Those that have all tokens leave, then those that outgrew their reservation ask."""
        done = [job for job in node.running if job.done >= job.outputs]
        for job in sorted(done, key=lambda job: job.index):
            node.running.remove(job)
            self.finish(node, job, now)
        if node.paged or node.spec.engine.batching == "static":
            return
        for job in sorted(node.running, key=lambda job: job.index):
            if job.held == job.reserved:
                more = min(node.expected(job), node.capacity - node.used)
                job.reserved += more
                if more == 0:
                    node.evict(job)

    def finish(self, node: Node, job: Job, now: float) -> None:
        job.finish = now
        self.changed = True
        node.release(job)
        self.ready.append(now + self.think)
        self.release(node, job)

    def send_cache(self, node: Node, job: Job, now: float) -> None:
        assert job.target is not None
        link = self.links.get((node.spec.name, job.target.spec.name), self.default_link)
        assert isinstance(link, KvLink)
        size = node.spec.kv_bytes_per_token * link.compression
        job.transfer = link.latency_s + size / (link.bandwidth_gbs * 1e9) * job.stored
        job.transfer_end = now + job.transfer
        node.leaving.append(job)
        self.transfers.append(job)

    def end_transfers(self, now: float) -> None:
        ended = [job for job in self.transfers if job.transfer_end == now]
        for job in ended:
            assert job.node is not None
            self.transfers.remove(job)
            job.node.leaving.remove(job)
            job.node.release(job)
        for job in sorted(ended, key=lambda job: job.index):
            assert job.target is not None
            job.at_hand = True
            job.target.put(job)

    # The dispatcher ------------------------------------------------------------------------

    def charge(self, node: Node, job: Job) -> None:
        node.outstanding += 1
        node.outstanding_tokens += job.inputs + job.predicted

    def release(self, node: Node, job: Job) -> None:
        node.outstanding -= 1
        node.outstanding_tokens -= job.inputs + job.predicted

    def decode_node(self, job: Job) -> Node | None:
        """The decode replica with the emptiest cache in the dispatcher's records."""
        good = [n for n in self.nodes if n.spec.role == "decode" and n.open and n.fits(job)]
        return min(good, key=lambda n: n.outstanding_tokens / n.usable_tokens, default=None)

    def takers(self, job: Job, *, down_too: bool = False) -> list[Node]:
        decode = any(
            n.spec.role == "decode" and (n.open or down_too) and n.fits(job) for n in self.nodes
        )
        return [
            n
            for n in self.nodes
            if n.spec.role != "decode"
            and (n.open or down_too)
            and n.fits(job)
            and (n.spec.role == "both" or decode)
        ]

    def choose(self, job: Job, good: list[Node]) -> Node | None:
        if self.policy == "first":
            first = self.nodes[0]
            if not first.open and first.spec.role != "decode" and first.fits(job):
                job.reason = DEFERRED
            return first if first in good else None
        if self.policy == "least requests below 2":
            best = min(good, key=lambda n: n.outstanding)
            if best.outstanding >= 2:
                job.reason = DEFERRED
                return None
            return best
        if self.policy == "least requests":
            return min(good, key=lambda n: n.outstanding)
        if self.policy == "pairs":
            return self.choose_pair(job, good)
        if self.policy == "least tokens":
            return min(good, key=lambda n: n.outstanding_tokens)
        chosen = next((n for n in good if n.index >= self.turn), good[0])
        self.turn = (chosen.index + 1) % len(self.nodes)
        return chosen

    def choose_pair(self, job: Job, good: list[Node]) -> Node:
        """Every pair that may serve earns its weight; the richest serves and pays for all."""
        may = []
        for k, (i, j, _) in enumerate(self.pairs):
            target = self.nodes[j]
            if self.nodes[i] in good and (i == j or (target.open and target.fits(job))):
                may.append(k)
        if not may:
            return min(good, key=lambda n: n.outstanding_tokens)
        for k in may:
            self.credits[k] += self.pairs[k][2]
        best = max(may, key=lambda k: self.credits[k])
        self.credits[best] -= sum(self.pairs[k][2] for k in may)
        i, j, _ = self.pairs[best]
        job.target = self.nodes[j] if i != j else None
        return self.nodes[i]

    def route(self, job: Job) -> None:
        good = self.takers(job)
        job.node = job.target = None
        job.reason = ""
        node = self.choose(job, good) if good else None
        if node is None:
            if not good:
                job.reason = NO_REPLICA if self.takers(job, down_too=True) else TOO_LONG
            job.reason = job.reason or REFUSED
            if job.reason in (DEFERRED, NO_REPLICA):
                self.held.append(job)
            else:
                self.ready.append(self.now + self.think)
            return
        job.node = node
        self.charge(node, job)
        if node.spec.role == "prefill":
            job.target = job.target or self.decode_node(job)
            assert job.target is not None
            self.charge(job.target, job)
        node.put(job)

    def offer(self, *reasons: str) -> None:
        """Route held requests again, the oldest first; deferred ones until one is deferred."""
        waiting, self.held = sorted(self.held, key=lambda job: (job.priority, job.index)), []
        asks = True
        for job in waiting:
            if job.reason in reasons and (asks or job.reason != DEFERRED):
                self.route(job)
                asks = asks and job.reason != DEFERRED
            else:
                self.held.append(job)

    def fail(self, node: Node, now: float) -> None:
        if not node.up:
            return
        node.up = False
        if node.end is not None:
            node.busy += now - node.begun
        lost = [*node.queue, *node.running, *node.prompts, *node.ahead.prompts, *node.ahead.back]
        node.ahead = Next()
        lost += [node.partial] if node.partial else []
        for job in lost:
            self.release(node, job)
            if node.spec.role == "prefill":
                assert job.target is not None
                self.release(job.target, job)
        gone = [job for job in self.transfers if node in (job.node, job.target)]
        for job in sorted(gone, key=lambda job: job.index):
            assert job.node is not None
            assert job.target is not None
            self.transfers.remove(job)
            job.node.leaving.remove(job)
            job.node.release(job)
            self.release(job.target, job)
            if job.last > now:
                job.first, job.last = min(job.first, now), now
            lost.append(job)
        node.queue.clear()
        node.empty()
        node.running, node.prompts, node.leaving, node.partial = [], [], [], None
        node.places, node.chunked, node.chunk, node.stall, node.end = [], 0, 0, 0.0, None
        node.decodes, node.fed = False, 0
        lost += self.rebind(node)
        for job in lost:
            job.retries += 1
            job.reserved = 0
            job.blocks = []
            job.at_hand = job.swapped = False
            job.reason = NO_REPLICA
        self.held += lost

    def rebind(self, gone: Node) -> list[Job]:
        """Give requests in prefill another decode replica; return those that get none."""
        bound = [
            (job, node)
            for node in self.nodes
            if node.spec.role == "prefill"
            for job in [
                *node.queue,
                *node.prompts,
                *node.ahead.prompts,
                *([node.partial] if node.partial else []),
            ]
            if job.target is gone
        ]
        lost = []
        for job, node in sorted(bound, key=lambda pair: pair[0].index):
            self.release(gone, job)
            job.target = self.decode_node(job)
            if job.target is not None:
                self.charge(job.target, job)
                continue
            self.release(node, job)
            if job in node.queue:
                node.queue.remove(job)
            elif job in node.prompts:
                node.prompts.remove(job)
            elif job in node.ahead.prompts:
                node.ahead.prompts.remove(job)
            else:
                node.partial, node.chunked, node.chunk = None, 0, 0
            node.release(job)
            lost.append(job)
        return lost
