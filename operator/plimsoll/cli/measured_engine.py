"""The engine that `plimsoll profile` measures, at a URL or in a pod of a service, and the facts that it reports.

Problem: a measurement must reach the engine that the user named and no other, also if the server redirects, if a proxy
is set, or if another service has a pod of a similar name.

Idea: a URL is host and port alone, redirects are not followed, and proxies of the environment are not used. A pod is
found by the labels that the operator sets, and asked through the API server with the permissions of the user.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import aiohttp

from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.adapters.engine_of_pod import api_port, engine_of, has_launcher
from plimsoll.adapters.kube_client import PODS, KubeClient
from plimsoll.adapters.launcher import parse_engine_info
from plimsoll.adapters.response_body import read_body
from plimsoll.adapters.unlaunched_engine import cache_shape
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.cli import cluster
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.output import printable_line
from plimsoll.core.errors import BackendUnavailable, ClusterError, cause_of
from plimsoll.core.types import Role
from plimsoll.engines.registry import ENGINES
from plimsoll.sim.errors import BadInput

KubeObject = dict[str, Any]

MAX_ANSWER_BYTES: Final = 4 << 20
_MAX_NAME_CHARS: Final = 1024  # of a model; each request has it
REQUEST_TIMEOUT_S: Final = 60.0
_SHOWN_NAMES: Final = 10
_MAX_WORDS: Final = 200  # characters of an engine in a message
_MEASURED_ROLES: Final = (Role.SERVE, Role.DECODE)  # a prefill engine generates one token


@dataclass(frozen=True)
class Answer:
    """Status and body of an answer."""

    status: int
    body: bytes


class Connection(Protocol):
    """Sends requests to one engine."""

    async def send(self, path: str, body: bytes | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Answer:
        """GET, or POST of a JSON body. Raises OSError, TimeoutError or ValueError without an answer."""

    async def about(self) -> bytes:
        """The document of Plimsoll's launcher; empty without one."""


@dataclass(frozen=True)
class EngineFacts:
    """Facts that an engine reports; None for those that it does not report. running: its requests, of all clients."""

    model: str
    max_model_len: int | None
    kv_tokens: int | None
    block_tokens: int | None
    max_sequences: int | None = None
    token_budget: int | None = None
    accelerator: str | None = None
    config: Mapping[str, object] | None = None
    running: float | None = None


@dataclass(frozen=True)
class UrlConnection:
    """An engine at a URL without path."""

    session: aiohttp.ClientSession
    url: str

    async def send(self, path: str, body: bytes | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Answer:
        try:
            async with self.session.request(
                "GET" if body is None else "POST",
                f"{self.url}{path}",
                data=body,
                headers={} if body is None else {"content-type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                read = await read_body(response, MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, ValueError) as error:
            raise OSError(cause_of(error)) from error
        if read is None:
            raise ValueError(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
        return Answer(response.status, read)

    async def about(self) -> bytes:
        return b""


@dataclass(frozen=True)
class PodConnection:
    """An engine in a pod, through the API server. launcher_port: 0 without a launcher."""

    kube: KubeClient
    namespace: str
    pod: str
    port: int
    launcher_port: int

    async def send(self, path: str, body: bytes | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Answer:
        document = None if body is None else json.loads(body)
        try:
            read = await self.kube.request_pod(
                self.namespace, self.pod, self.port, path.lstrip("/"), document, timeout_s
            )
        except BackendUnavailable as error:
            raise OSError(str(error)) from error
        except ClusterError as error:
            return Answer(error.status, str(error).encode())
        return Answer(200, read)

    async def about(self) -> bytes:
        if not self.launcher_port:
            return b""
        path = engine_contract().paths["about"].lstrip("/")
        try:
            return await self.kube.request_pod(self.namespace, self.pod, self.launcher_port, path)
        except ClusterError:
            return b""


@asynccontextmanager
async def connect_url(url: str) -> AsyncIterator[UrlConnection]:
    """Connect to http://HOST:PORT or https://HOST:PORT. Raises BadInput for any other URL."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == 0
        or parts.path not in ("", "/")
        or parts.query
        or parts.fragment
        or parts.username is not None
    ):
        raise BadInput(f"{url}: must be http://HOST:PORT or https://HOST:PORT, without user, path or query")
    connector = aiohttp.TCPConnector(limit=0)  # a batch is sent at once
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        yield UrlConnection(session, url.rstrip("/"))


async def connect_pod(kube: KubeClient, namespace: str, name: str) -> PodConnection:
    """A ready engine of a service that generates text. Raises ClusterQueryError."""
    service = await cluster.get_service(kube, namespace, name)
    if (service.get("spec") or {}).get("targets") is not None:
        raise ClusterQueryError(f"service {name} has targets: forward a port of one of their pods, and give its URL")
    try:
        pods, _ = await kube.list(PODS, namespace, f"{labels.SERVICE}={name},{labels.ROLE}")
    except ClusterError as error:
        raise ClusterQueryError(f"cannot list the pods of service {name}: {error}") from error
    ready = [pod for pod in pods if _is_ready(pod) and pod["metadata"]["labels"].get(labels.ROLE) in _MEASURED_ROLES]
    if not ready:
        raise ClusterQueryError(f"service {name} has no ready serve or decode engine: see plimsoll doctor {name}")
    pod = min(ready, key=lambda one: str(one["metadata"]["name"]))
    if pod["metadata"]["labels"].get(labels.TLS) == labels.MUTUAL_TLS:
        raise ClusterQueryError(f"engines of service {name} require mutual TLS: only its gateways can send to them")
    if engine_of(pod).metrics is None:
        raise ClusterQueryError(f"the engine of service {name} is unknown: forward a port of its pod, and give its URL")
    launcher = engine_contract().ports["launcher"] if has_launcher(pod) else 0
    return PodConnection(kube, namespace, pod["metadata"]["name"], api_port(pod), launcher)


def _is_ready(pod: KubeObject) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def words_of(value: object) -> str:
    """The text that an engine sent, short and without control characters, for a message on a terminal."""
    return printable_line(str(value)[:_MAX_WORDS])


async def read_facts(connection: Connection, model: str) -> EngineFacts:
    """Returns what an engine reports. model: the name that it serves, "" for the first of its list. Raises BadInput."""
    paths = sorted({engine.metrics_path for engine in ENGINES.values()})
    models, *pages = await asyncio.gather(*(_get(connection, path) for path in ("/v1/models", *paths)))
    page = b"\n".join(one for one in pages if one)
    if models is None:
        raise BadInput("the engine does not list its models at /v1/models")
    name, length = _listed_model(models, model)
    block_tokens, kv_tokens = cache_shape(page)
    facts = EngineFacts(name, length, kv_tokens, block_tokens, running=_running(page))
    try:
        info, _ = parse_engine_info(await connection.about())
    except ValueError:
        return facts
    return EngineFacts(
        name,
        info.max_model_len or length,
        info.kv_tokens or kv_tokens,
        info.block_tokens or block_tokens,
        info.max_sequences,
        info.token_budget,
        info.accelerator,
        info.config,
        facts.running,
    )


async def _get(connection: Connection, path: str) -> bytes | None:
    """The body at a path; None for an error. Raises BadInput if the engine is not there."""
    try:
        answer = await connection.send(path)
    except (OSError, TimeoutError, ValueError) as error:
        raise BadInput(f"the engine does not answer GET {path}: {cause_of(error)}") from None
    return answer.body if answer.status == 200 else None


def _listed_model(body: bytes, model: str) -> tuple[str, int | None]:
    """Name and longest request of a listed model."""
    try:
        entries = {str(entry["id"]): entry.get("max_model_len") for entry in json.loads(body)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        entries = {}
    entries = {name: length for name, length in entries.items() if len(name) <= _MAX_NAME_CHARS}
    name = model or next(iter(entries), "")
    if name not in entries:
        has = words_of(", ".join(itertools.islice(entries, _SHOWN_NAMES))) or "none"
        if len(entries) > _SHOWN_NAMES:
            has += f", and {len(entries) - _SHOWN_NAMES} more"
        raise BadInput(f"the engine lists no model {name}".rstrip() + f" at /v1/models: it has {has}")
    length = entries[name]
    return name, length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None


def _running(page: bytes) -> float | None:
    """Running and waiting requests by the first engine's metric names that the page has; None without any."""
    for engine in ENGINES.values():
        if engine.metrics is None:
            continue
        try:
            reading = parse_metrics(page, "", 0.0, engine.metrics)
        except ValueError:
            continue
        if reading.running is not None:
            return reading.running + (reading.waiting or 0.0)
    return None
