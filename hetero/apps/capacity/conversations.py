r"""Conversations: sessions of several turns whose next prompt holds all that was said before.

A session begins after an exponential time; its turns are geometric in number. With the tokens
:math:`u_k` of the user's k-th text, :math:`a_k` of the answer to it and s of the system prompt, the
prompts are

.. math::
    p_k = s + \sum_{j \le k} u_j + \sum_{j < k} a_j

and a turn comes a time to think after the answer before it, which takes so long per token. Prompts
of a session begin alike, those of all sessions with the system prompt: their prefix blocks say so,
and prefix caches and cache-aware routers find them. Caches hold prompts
(:mod:`hetero.engine.prefix`): an answer is prefilled once more, with the prompt that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetero.errors import require, require_not_negative, require_positive
from hetero.streams import stream
from hetero.workload import Trace
from hetero.workload.synthetic import LengthDistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Numbers that sessions are drawn from.

    Attributes
    ----------
    rate_per_s
        Sessions that begin per second.
    turns
        Mean number of turns, at least 1.
    user_tokens, answer_tokens
        Lengths of a user's text and of an answer.
    system_tokens
        Length of the prompt with which all sessions begin.
    think_s
        Mean time from an answer to the next turn, exponential [s].
    token_s
        Time that an answer takes per token [s]. It is stated, not simulated: a fleet that answers
        more slowly gets the next turn no later.

    Examples
    --------
    >>> from hetero.workload.synthetic import Fixed
    >>> numbers = {"user_tokens": Fixed(32), "answer_tokens": Fixed(16), "think_s": 9.0}
    >>> trace = Conversations(rate_per_s=1.0, turns=3.0, **numbers).draw(100, seed=0)
    >>> trace.input_tokens[trace.session_ids == 3].tolist()
    [32, 80]
    """

    rate_per_s: float
    turns: float
    user_tokens: LengthDistribution
    answer_tokens: LengthDistribution
    system_tokens: int = 0
    think_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(rate_per_s=self.rate_per_s)
        require_not_negative(
            system_tokens=self.system_tokens, think_s=self.think_s, token_s=self.token_s
        )
        require(
            self.turns >= 1,
            f"Sessions have {self.turns:g} turns on average.",
            resolve="give a mean of 1 or more.",
        )

    def draw(self, sessions: int, seed: int = 0, *, block_tokens: int = 16) -> Trace:
        """So many sessions, their turns in order of arrival.

        The first turns come before the first answers are read, and the last sessions end alone:
        between, turns come at the rate of sessions times their mean number.
        """
        require_positive(sessions=sessions, block_tokens=block_tokens)
        counts, lengths, times = stream(seed, "conversations").spawn(3)
        turns = counts.geometric(1.0 / self.turns, sessions)
        first = np.cumsum(turns) - turns
        session = np.repeat(np.arange(sessions), turns)
        user = self.user_tokens.draw(len(session), lengths).astype(np.int64)
        answer = self.answer_tokens.draw(len(session), lengths).astype(np.int64)
        begin_s = np.cumsum(times.exponential(1.0 / self.rate_per_s, sessions))
        gap_s = times.exponential(self.think_s, len(session))
        gap_s[1:] += self.token_s * answer[:-1]
        gap_s[first] = begin_s
        said = np.cumsum(user + answer)
        prompt = (
            self.system_tokens + said - answer - np.repeat((said - user - answer)[first], turns)
        )
        waited = np.cumsum(gap_s)
        arrival_s = waited - np.repeat((waited - gap_s)[first], turns)
        # Blocks within the system prompt are the same everywhere, the others within a session.
        blocks = prompt // block_tokens
        offsets = np.concatenate([[0], np.cumsum(blocks)])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks)
        most = np.maximum.reduceat(blocks, first)
        own = np.repeat(np.repeat(np.cumsum(most) - most, turns), blocks)
        shared = self.system_tokens // block_tokens
        ids = np.where(place < shared, place, shared + own + place)
        drawn = Trace(
            np.zeros(len(session)),
            prompt.astype(np.int32),
            answer.astype(np.int32),
            name="conversations",
            source=f"synthetic, seed {seed}",
            prefix_offsets=offsets,
            prefix_ids=ids,
            block_tokens=block_tokens,
            session_ids=session,
        )
        order = np.argsort(arrival_s, kind="stable")
        return replace(drawn.take(order), arrival_s=arrival_s[order])
