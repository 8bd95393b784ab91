"""What each client has in the house, and what it may have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.settings import Client

_SHARE = 8.0  # times the free places that a client may take; it alone gets 8/9 of all


@dataclass(eq=False, slots=True)
class Account:
    """The requests of one client.

    A client may have as many requests in the house as :math:`8 w` times the places that are free,
    w its weight: those that ask for more than there is then have places in proportion to their
    weights, and whoever asks for little finds one free (the dynamic thresholds of Choudhury and
    Hahne, 1998).

    Attributes
    ----------
    inside, away
        Its requests in the house, and of these at engines.

    Examples
    --------
    >>> one = Account(Client(name="a", key_env="A", rps=2.0))
    >>> one.arrive(0.0), one.arrive(0.0)
    (None, None)
    >>> one.arrive(0.1)
    Traceback (most recent call last):
        ...
    hetero.apps.serving.faults.Refusal: The client a may send 2 requests/s.
    >>> one.arrive(0.5)
    """

    client: Client
    inside: int = 0
    away: int = 0
    _left: float = math.inf
    _at_s: float = 0.0

    def arrive(self, now_s: float) -> None:
        """A request has come.

        Raises
        ------
        Refusal
            If they come too fast.
        """
        if (rps := self.client.rps) is None:
            return
        left = min(self._left + rps * (now_s - self._at_s), max(rps, 1.0))
        self._left, self._at_s = left, now_s
        if left < 1.0:
            text = f"The client {self.client.name} may send {rps:g} requests/s."
            after_s = math.ceil((1.0 - left) / rps)
            raise Refusal(429, "rate_limited", text, retry_after_s=after_s)
        self._left -= 1.0

    def check(self, free: int, *, alone: bool) -> None:
        """See whether it may have one request more.

        Parameters
        ----------
        free
            Places for requests in the house.
        alone
            Whether there are no other clients.

        Raises
        ------
        Refusal
            If it has as many as it may.
        """
        most = self.client.concurrent
        if most is not None and self.inside >= most:
            text = f"The client {self.client.name} may have {most} requests at once."
            raise Refusal(429, "too_many_at_once", text, retry_after_s=1.0)
        if not alone and self.inside >= _SHARE * self.client.weight * free:
            text = f"The house is full; {self.inside} requests are the share of {self.client.name}."
            raise Refusal(429, "overloaded", text, retry_after_s=1.0)

    @property
    def load(self) -> float:
        """Its requests at engines by its weight."""
        return self.away / self.client.weight
