"""Ranks in lockstep, step by step: the slow truth beside balanced ranks in the step model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hetero.catalog import Gpu, Llm
from hetero.latency.models.roofline import Efficiency, ExpertEfficiency
from hetero.workload import Trace

FP8 = 8.002 / 8  # bytes of a weight with its scale


@dataclass
class Group:
    """Times of a model with latent attention in fp8 on ranks of one GPU each, term by term."""

    gpu: Gpu
    llm: Llm
    own: Efficiency
    experts: ExpertEfficiency
    ranks: int

    def rank_s(self, tokens: float, cached: float, pairs: float) -> float:
        """What one rank does alone: attention, dense products, logits, the cache."""
        m, e = self.llm, self.own
        bandwidth = 1e9 * self.gpu.mem_bw_gbs
        routed = m.moe_layers * m.experts * m.expert_params
        visited = m.moe_layers * m.experts_active * m.expert_params
        work = 2.0 * (m.matmul_params - m.head_params - visited)
        work *= (tokens + e.padding_tokens) / (1e12 * self.gpu.peak_tflops("fp8"))
        held = m.params - m.embedding_params - m.output_params - routed
        rest = m.moe_layers * m.hidden * m.experts  # routers and norms stay in 16 bits
        rest += m.layers * (2 * m.hidden + m.q_lora_rank + m.kv_lora_rank)
        read = (held - rest) * FP8 + 2.0 * rest
        total = max(work / e.compute_efficiency, read / (bandwidth * e.bandwidth_efficiency))
        total += m.head_params / (bandwidth * e.bandwidth_efficiency)
        width = m.kv_lora_rank + m.qk_rope_head_dim
        total += 2.0 * m.layers * width * cached / (bandwidth * e.kv_efficiency)
        heads = m.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim)
        flops = 2.0 * m.layers * heads * pairs
        total += flops / (1e12 * self.gpu.fp16_tflops * e.attention_efficiency)
        return total + m.layers * e.layer_overhead_s + e.step_overhead_s

    def shared_s(self, tokens: float, least: float) -> float:
        """Experts of the busiest GPU; all tokens but those of the emptiest rank come to it."""
        m, e, x, g = self.llm, self.own, self.experts, self.ranks
        missed = (1.0 - m.experts_active / m.experts) ** tokens
        read = m.experts / g * (1.0 - missed)
        read = min(read + math.sqrt(2 * math.log(g) * read * missed), m.experts / g)
        visits = m.experts_active * tokens / g
        cap = tokens * min(m.experts_active, m.experts / g)
        visits = min(visits + math.sqrt(2 * math.log(g) * visits), cap)
        reading = read * m.expert_params * FP8 / (1e9 * self.gpu.mem_bw_gbs)
        computing = 2.0 * visits * m.expert_params / (1e12 * self.gpu.peak_tflops("fp8"))
        reading /= e.bandwidth_efficiency * x.bandwidth_share
        computing /= e.compute_efficiency * x.compute_share
        sent = 2.0 * m.hidden * (tokens - least)
        sent /= 1e9 * self.gpu.link_gbs * e.link_efficiency
        way = 2 * (sent + (g - 1) * e.hop_latency_s) if g > 1 else 0.0
        return m.moe_layers * (reading + computing + x.layer_s + way)

    def step_s(self, work: list[tuple[float, float, float]]) -> float:
        """A step of all ranks, which wait for the slowest; each has tokens, cached and pairs."""
        alone = max(self.rank_s(*one) for one in work)
        tokens = [n for n, *_ in work]
        return alone + self.shared_s(sum(tokens), min(tokens))


def run(group: Group, trace: Trace, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Times to the first token and per further one [s], requests to the rank that has fewest."""
    waiting = list(range(len(trace)))
    ranks: list[list[int]] = [[] for _ in range(group.ranks)]
    done, made = np.zeros(len(trace)), np.zeros(len(trace))
    first, last = np.zeros(len(trace)), np.zeros(len(trace))
    now = 0.0
    while waiting or any(ranks):
        if not any(ranks):
            now = max(now, float(trace.arrival_s[waiting[0]]))
        while waiting and trace.arrival_s[waiting[0]] <= now:
            min(ranks, key=len).append(waiting.pop(0))
        work, took = [], []
        for held in ranks:
            decoding = [k for k in held if done[k] >= trace.input_tokens[k]]
            left, pairs, n = chunk - len(decoding), 0.0, float(len(decoding))
            cached = sum(done[k] + made[k] for k in decoding)
            for k in held:
                take = min(left, trace.input_tokens[k] - done[k])
                if take > 0:
                    pairs += take * (done[k] + take / 2.0)
                    took.append((k, take))
                    left, n = left - take, n + take
            took += [(k, 0) for k in decoding]
            work.append((n, cached, pairs))
        now += group.step_s(work)
        for k, take in took:
            done[k] += take
            if done[k] >= trace.input_tokens[k]:
                made[k] += 1
                first[k] = first[k] or now
                last[k] = now
        ranks = [[k for k in held if made[k] < trace.output_tokens[k]] for held in ranks]
    ttft = first - trace.arrival_s
    return ttft, (last - first) / np.maximum(trace.output_tokens - 1, 1)
