"""Deployment files: which engines serve a model, and how requests come to them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hetero import catalog, files
from hetero.apps.refitted import refitted
from hetero.catalog import Gpu
from hetero.deployment import Batching, Deployment, Engine, Replica
from hetero.errors import DataError, HeteroError, ParameterError, require
from hetero.files import parse_yaml
from hetero.latency import storage
from hetero.latency.step import StepModel
from hetero.naming import Line, Name
from hetero.routers import factories
from hetero.routers.base import Builtin

# What is larger is a slip of the keyboard, and overflows the dispatcher's records or its memory.
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Batch = Annotated[int, Field(ge=1, le=65_536)]
_TYPICAL = StepModel.affine(
    floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7, source="assumed, for any engine"
)
_HOST = re.compile("[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_RESOLVE = "see the example in `hetero serve --help`."


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GpuFigures(_Strict):
    """Figures of a device that the catalog does not know, such as a processor."""

    name: Name
    fp16_tflops: Positive
    mem_gib: Positive
    mem_bw_gbs: Positive


class Backend(_Strict):
    """One engine; the page on serving says what each field does.

    A step model that is not named is assumed (:meth:`DeploymentFile.deployment`), and learnt.
    """

    # It goes into a header of every answer, so printable ASCII without spaces at its ends.
    name: str = Field(min_length=1, max_length=64, pattern=r"^[!-~]([ -~]*[!-~])?$")
    url: Line
    model: Line | None = None
    models: dict[Line, Line] = Field(default={}, max_length=1024)
    step: Path | None = None
    kv_tokens: Count
    max_batch: _Batch = 256
    max_step_tokens: Count = 2048
    batching: Batching = "chunked"
    block_tokens: _Batch = 16
    kv_bytes_per_token: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] = 0.0
    gpu: Name | GpuFigures | None = None
    gpus: _Batch = 1
    usd_per_h: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    api_key_env: Line | None = None
    health: Line = "/health"
    usage: bool = True
    drain: bool = False

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("write the address with its scheme, such as http://127.0.0.1:8001")
        parts = urlsplit(value)
        if not _HOST.fullmatch(parts.hostname or "") or not value.isascii() or parts.port == 0:
            raise ValueError("write an address with a host, in ASCII")
        return value.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.model is not None and self.models:
            raise ValueError("state either model or models")
        return self

    def key(self) -> str:
        """The engine's API key, empty where it needs none."""
        return os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""

    def served(self, model: str) -> dict[str, str]:
        """Names that clients may ask it for, ``model`` by default, and the engine's own."""
        return self.models or {model: self.model or model}


class DispatcherLimits(_Strict):
    """Bounds of the dispatcher: times [s], sizes [bytes] and numbers; see the page on serving."""

    max_requests: Count = 4096
    max_queue: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1024
    max_body_bytes: Count = 8 << 20
    body_s: Positive = 30.0
    bodies_bytes: Count = 256 << 20
    head_s: Positive = 10.0
    queue_s: Positive = 60.0
    down_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    token_s: Positive = 60.0
    request_s: Positive = 600.0
    send_s: Positive = 30.0
    connect_s: Positive = 5.0
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    health_s: Positive = 2.0
    health_timeout_s: Positive = 5.0
    failures: Count = 3
    cooldown_s: Positive = 2.0
    drain_s: Positive = 60.0


#: Predictor of output lengths: the median of recent ones, at most what a request allows; or that.
Outputs = Literal["recent", "allowed"]


class DeploymentFile(_Strict):
    """A deployment file, as the page on serving says."""

    model: Annotated[Line, Field(min_length=1)]
    backends: tuple[Backend, ...] = Field(min_length=1, max_length=4096)
    router: str | dict[str, Any] = "hetero"
    host: Line = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    api_keys_env: Line | None = None
    learn: bool = True
    request_log: Path | None = None
    limits: DispatcherLimits = DispatcherLimits()
    outputs: Outputs = "recent"
    folder: Path = Field(default=Path(), exclude=True)

    def chosen(self) -> Builtin:
        """The router."""
        named = {"name": self.router} if isinstance(self.router, str) else self.router
        options, name = dict(named), str(named.get("name", ""))
        options.pop("name", None)
        known = factories()
        hint = f"use one of {', '.join(known)}."
        require(name in known, f"No router is called '{name}'.", resolve=hint)
        try:
            return known[name](**options)
        except TypeError as error:
            raise ParameterError(
                f"Router '{name}' does not take {options} ({error}).",
                resolve="use the parameters of its class in hetero.routers.",
            ) from None

    def deployment(self) -> Deployment:
        """The engines as replicas, with their step models.

        One that names no step model begins with that of the first that does, if possible one with
        the same GPU; where both name their GPU, prefill takes longer by its peak compute, and all
        else by its memory bandwidth. Where no engine has one, steps of 20 ms are assumed.
        """
        # One object per file: engines of one kind are valued once for each request.
        named = {one.step for one in self.backends if one.step}
        steps = {None: _TYPICAL} | {file: storage.load(self.folder / file) for file in named}
        found = []
        for one in self.backends:
            told = [one] if one.step else [other for other in self.backends if other.step]
            like = min(told, key=lambda other: other.gpu != one.gpu, default=one)
            step = steps[like.step]
            found.append(self._replica(one, step if like is one else _assumed(one, like, step)))
        return Deployment(self.model, tuple(found))

    def _replica(self, backend: Backend, step: StepModel) -> Replica:
        return Replica(
            backend.name,
            step,
            backend.kv_tokens,
            backend.kv_bytes_per_token,
            engine=Engine(
                batching=backend.batching,
                admission="known" if backend.batching == "static" else "paged",
                max_batch=backend.max_batch,
                max_step_tokens=backend.max_step_tokens,
                block_tokens=backend.block_tokens,
            ),
            gpu=_gpu(backend.gpu),
            gpus=backend.gpus,
            usd_per_h=backend.usd_per_h,
        )

    @property
    def models(self) -> dict[str, None]:
        """Names that clients may ask for, in order."""
        return {name: None for one in self.backends for name in one.served(self.model)}

    def keys(self) -> dict[bytes, str]:
        """Keys that clients may use, and what logs call them; empty where everyone may ask."""
        if self.api_keys_env is None:
            return {}
        parts = os.environ.get(self.api_keys_env, "").encode().split(b",")
        found = {part.strip(): f"key {k}" for k, part in enumerate(parts, 1) if part.strip()}
        if not found:
            raise ParameterError(
                f"The environment variable {self.api_keys_env} holds no key.",
                resolve="set it, several keys of api_keys_env by commas, or leave its name out.",
            )
        return found


def _assumed(one: Backend, like: Backend, step: StepModel) -> StepModel:
    """Step times to begin with of an engine, from those of another."""
    mine, other = _gpu(one.gpu), _gpu(like.gpu)
    if mine is not None and other is not None:
        compute = other.fp16_tflops * like.gpus / (mine.fp16_tflops * one.gpus)
        memory = other.mem_bw_gbs * like.gpus / (mine.mem_bw_gbs * one.gpus)
        step = refitted(
            step, compute, memory, step.request_s, min(one.max_batch, 1024), floor=memory
        )
    return replace(step, source=f"assumed, from that of {like.name}", provenance="assumed")


def _gpu(value: str | GpuFigures | None) -> Gpu | None:
    if value is None or isinstance(value, str):
        return None if value is None else catalog.gpu(value)
    links: Any = {"link_type": "none", "link_gbs": 1.0, "pcie_gbs": 1.0}
    return Gpu(**value.model_dump(), **links, source="deployment file")


def load(path: Path | str) -> DeploymentFile:
    """Read a deployment file; a ``DataError`` names what is missing, and what is wrong first."""
    path = Path(path)
    try:
        text = files.text(path)
        if '"hetero plan card"' in text[:100]:
            say = f"say `hetero export {path} --to serve -o FOLDER`, and serve what that writes."
            raise DataError("this is a plan card.", path=path, resolve=say)
        raw = parse_yaml(text, path)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or error.__class__.__name__
        raise DataError(f"cannot be read ({why}).", path=path, resolve="check the path.") from None
    if not isinstance(raw, dict):
        raise DataError("this is no mapping.", path=path, resolve=_RESOLVE)
    try:
        settings = DeploymentFile.model_validate(raw | {"folder": path.parent})
    except ValidationError as error:
        found = error.errors()
        missing = [_where(one["loc"]) for one in found if one["type"] == "missing"]
        said = [f"{', '.join(missing)}: missing"] if missing else []
        other = next((one for one in found if one["type"] != "missing"), None)
        if other is not None:
            said.append(f"{_where(other['loc'])}: {other['msg'].removeprefix('Value error, ')}")
        raise DataError(f"{'; '.join(said)}.", path=path, resolve=_RESOLVE) from None
    try:
        settings.chosen().memory(settings.deployment())
    except DataError:
        raise
    except HeteroError as error:
        raise DataError(error.what, path=path, resolve=error.resolve) from None
    return settings


def _where(place: tuple[int | str, ...]) -> str:
    return ".".join(map(str, place)) or "the file as a whole"
