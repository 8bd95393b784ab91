"""An OpenAI-compatible endpoint, asked for one streamed completion at a time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero.errors import EndpointError, ParameterError, require

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_INSTALL = "install it with `pip install 'hetero[serving]'`."


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion as its client saw it.

    Attributes
    ----------
    input_tokens, output_tokens
        As the server counted them.
    sent_s
        When the request was sent, on a monotonic clock [s].
    chunk_s
        When each streamed piece of the output came, same clock [s].
    engine
        Name of the engine behind the server, where it is a dispatcher that tells.
    """

    input_tokens: int
    output_tokens: int
    sent_s: float
    chunk_s: tuple[float, ...]
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask and for which model.

    Parameters
    ----------
    url
        Base address, such as ``http://localhost:8000``; ``/v1`` is added where it is missing.
    model
        Name under which the server knows the model.
    api_key
        Sent where the server asks for one; never shown.
    timeout_s
        Longest wait for the next piece of an answer [s].

    Examples
    --------
    >>> Endpoint("http://localhost:8000", "tiny").base_url
    'http://localhost:8000/v1'
    """

    url: str
    model: str
    api_key: str = ""
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require(
            self.url.startswith(("http://", "https://")),
            f"'{self.url}' is no address of a server.",
            resolve="write it with its scheme, such as http://localhost:8000.",
        )

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, {self.model!r})"

    @property
    def base_url(self) -> str:
        """Address below which the completions lie."""
        base = self.url.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncOpenAI]:
        """The official client, which never sends a request a second time on its own."""
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError as error:
            raise ParameterError(
                "Asking a server needs the package openai, which is not installed.",
                resolve=_INSTALL,
            ) from error
        async with AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key or "none",
            timeout=self.timeout_s,
            max_retries=0,
        ) as client:
            yield client

    async def models(self, client: AsyncOpenAI) -> tuple[str, ...]:
        """Names of the models that the server offers.

        Raises
        ------
        EndpointError
            If the server cannot be reached or does not list them.
        """
        try:
            return tuple([model.id async for model in client.models.list()])
        except Exception as error:
            raise self._explained(error) from error

    async def complete(
        self, client: AsyncOpenAI, prompt: str, output_tokens: int, *, ignore_eos: bool = True
    ) -> Reply:
        """Ask for a streamed completion of so many tokens.

        Parameters
        ----------
        ignore_eos
            Ask the engine to go on after an end token; vLLM and SGLang know this, others ignore
            it, and some refuse it.

        Raises
        ------
        EndpointError
            If the server is not there, refuses, is too slow, breaks off, does not stream, or does
            not count tokens.
        """
        extra: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        sent = time.perf_counter()
        chunks: list[float] = []
        usage = None
        finished = False
        engine = ""
        try:
            answer = await client.completions.with_raw_response.create(
                model=self.model,
                prompt=prompt,
                max_tokens=output_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
            )
            engine = answer.headers.get("x-hetero-engine", "")
            async for piece in answer.parse():
                now = time.perf_counter()
                usage = piece.usage or usage
                for choice in piece.choices:
                    # The last piece may only say why the stream ends.
                    if choice.text or choice.finish_reason is None:
                        chunks.append(now)
                    finished = finished or choice.finish_reason is not None
        except Exception as error:
            raise self._explained(error, begun=bool(chunks)) from error
        require(
            bool(chunks or finished),
            f"{self.url} answered without streaming.",
            resolve="use an endpoint whose /v1/completions streams (server-sent events).",
            error=EndpointError,
        )
        require(
            finished,
            f"{self.url} broke off after {len(chunks)} pieces of an answer.",
            resolve="look at the server's log, and run the same command again to go on.",
            error=EndpointError,
        )
        require(
            bool(chunks),
            f"{self.url} ended an answer without any text.",
            resolve="use a model whose output can be shown, and an engine that knows ignore_eos.",
            error=EndpointError,
        )
        if usage is None:
            raise EndpointError(
                f"{self.url} does not say how many tokens a request had.",
                resolve="use an engine that reports usage in streams (stream_options).",
            )
        return Reply(usage.prompt_tokens, usage.completion_tokens, sent, tuple(chunks), engine)

    def _explained(self, error: Exception, *, begun: bool = False) -> EndpointError:
        """What went wrong, in one sentence."""
        import openai

        if isinstance(error, openai.APITimeoutError):
            what = f"{self.url} sent nothing for {self.timeout_s:g} s"
            how = "wait longer with --timeout, or ask for smaller batches."
        elif isinstance(error, openai.RateLimitError):
            what = f"{self.url} limits the rate of requests ({_short(error)})"
            how = "use smaller batches, or wait and run the same command again to go on."
        elif isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            what = f"{self.url} refuses the key ({_short(error)})"
            how = "put a valid key into the environment variable HETERO_API_KEY."
        elif isinstance(error, openai.NotFoundError):
            what = f"{self.url} has no model '{self.model}' or no /v1/completions ({_short(error)})"
            how = "name a model that the server offers, and check the address."
        elif isinstance(error, openai.APIStatusError):
            what = f"{self.url} answered with status {error.status_code} ({_short(error)})"
            how = "look at the server's log, and run the same command again to go on."
        elif isinstance(error, openai.APIConnectionError) and not begun:
            what = f"{self.url} cannot be reached ({_short(error.__cause__ or error)})"
            how = "start the server, or check address and port."
        else:
            what = f"{self.url} broke off an answer ({_short(error.__cause__ or error)})"
            how = "look at the server's log, and run the same command again to go on."
        refused = EndpointError(f"{what}.", resolve=how)
        refused.status = getattr(error, "status_code", None)
        return refused


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."
