"""Lengths of requests before they have run: prompts as counted or estimated, outputs predicted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Any, NamedTuple

from hetero.apps.serving.settings import Outputs

_FIRST = 256  # output tokens, until an answer has ended
_SAMPLE = 200  # answers, of which the median is predicted
_START = 4.0  # characters per token of English text, until engines have told
_MEMORY = 0.05  # weight of the newest prompt in the average


class PromptSize(NamedTuple):
    """Size of a prompt: tokens given as numbers, and characters of text."""

    numbers: int
    characters: int


class LengthEstimates:
    """Estimates prompts from what engines counted before, and predicts outputs.

    Examples
    --------
    >>> lengths = LengthEstimates("recent")
    >>> [lengths.prompt(size({"prompt": prompt})) for prompt in ("a" * 400, [1, 2, 3])]
    [100, 3]
    >>> lengths.output(32)
    32
    """

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._per_token = _START
        self._seen = 0
        self._recent: deque[int] = deque(maxlen=_SAMPLE)
        self._median = _FIRST
        self._sorted: list[int] = []

    def prompt(self, prompt: PromptSize) -> int:
        """Tokens of the prompt: counted where they are given as numbers, else estimated."""
        numbers, characters = prompt
        return max(1, numbers + round(characters / self._per_token))

    def output(self, allowed: int | None, copies: int = 1, *, endless: bool = False) -> int:
        """Predicted output tokens of so many answers, where so many are allowed each."""
        if allowed is None:
            return self._median * copies
        if self._outputs == "allowed" or endless:
            return allowed * copies
        return min(allowed, self._median) * copies

    def learn(self, prompt: PromptSize, input_tokens: int, output_tokens: int) -> None:
        """Take over what an engine counted for a finished request."""
        numbers, characters = prompt
        # The mean of what there is until there is enough to forget.
        weight = max(_MEMORY, 1.0 / (self._seen + 1))
        self._seen += 1
        if characters >= 16 and input_tokens > numbers:
            ratio = characters / (input_tokens - numbers)
            self._per_token += weight * (min(max(ratio, 0.25), 16.0) - self._per_token)
        if output_tokens > 0:
            if len(self._recent) == _SAMPLE:
                del self._sorted[bisect_left(self._sorted, self._recent[0])]
            self._recent.append(output_tokens)
            insort(self._sorted, output_tokens)
            self._median = self._sorted[round(0.5 * (len(self._sorted) - 1))]


def size(body: dict[str, Any]) -> PromptSize:
    """Size of the prompt or the messages of a request."""
    numbers = characters = 0
    stack: list[Any] = [body.get("prompt"), body.get("input")]
    messages = body.get("messages")
    if isinstance(messages, list):
        stack += [one.get("content") for one in messages if isinstance(one, dict)]
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            characters += len(part)
        elif isinstance(part, list):
            if part and isinstance(part[0], int):
                numbers += len(part)
            else:
                stack += part
        elif isinstance(part, dict):
            stack += part.get("text"), part.get("content")
    return PromptSize(numbers, characters)
