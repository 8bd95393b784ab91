"""What can go wrong with a request, as the status and text that its client gets."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """A request that is not, or not wholly, answered.

    Parameters
    ----------
    status
        HTTP status where nothing has been sent yet.
    code
        Short name for programs.
    retry_after_s
        When it may be worth to ask again [s].
    """

    def __init__(
        self, status: int, code: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error in the form that OpenAI clients read."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "")
        return {
            "error": {
                "message": self.message,
                "type": kind or "invalid_request_error",
                "param": None,
                "code": self.code,
            }
        }


class Failed(Exception):
    """An attempt at one engine that brought nothing; others may be asked.

    Parameters
    ----------
    refusal
        What the client gets if no other engine answers.
    hard
        Whether the engine is not there at all.
    blames
        Whether it counts against the engine: one that is merely full is not broken.
    stale
        Whether the engine closed the connection before it said anything, as it does with
        connections that were idle for long: the same engine may be asked once more.
    """

    def __init__(
        self, refusal: Refusal, *, hard: bool = False, blames: bool = True, stale: bool = False
    ) -> None:
        super().__init__(refusal.message)
        self.refusal, self.hard, self.blames, self.stale = refusal, hard, blames, stale
