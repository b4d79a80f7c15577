"""Prefix routing before two real engines: what the gateway's index believes, what engines say, and the result.

Problem: the gateway estimates which prompts an engine holds. Engines could say it by KV events. Which of the two is
right more often, and would a better belief find more?

Idea: the gateway's own admission control picks the engine of each request, in real time. Before that its index, and an
index made of the engines' KV events, each say what every engine holds. The engine's `usage` then has the truth.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Final

import aiohttp
import numpy as np

from bench.gpu_engine import prefix_trace
from bench.gpu_engine.kv_events import EventReader
from bench.hardware import client
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel, engine_cost_model
from plimsoll.core.admission.prefix_tokens import prefix_tokens
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.routing.prefix_index import PrefixIndex
from plimsoll.core.slo import Slo
from plimsoll.core.types import KV_BLOCK_TOKENS, Role
from plimsoll.core.workload import from_samples
from plimsoll.gateway.prefix_hash import block_hashes
from plimsoll.gateway.request_parser import ParsedRequest, parse_body

MODEL: Final = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200, power-capped
CLASSES: Final = (ClassPolicy("chat", 0, Slo(0.95, 20.0, 1.0, None)),)  # loose: each request is to have a first token
FAR_TOKENS: Final = KV_BLOCK_TOKENS  # a belief that is further off is wrong
_CHAT: Final = "/v1/chat/completions"
_TICK_S: Final = 1.0


@dataclass(frozen=True)
class Outcome:
    """One request. Tokens: `ideal` of an endless cache, `index` and `events` as believed of the engine that was chosen,
    `best_events` as the events say of the engine that holds most, `cached` as the engine counted.
    """

    kind: str
    engine: str
    prompt: int
    ideal: int
    index: int
    events: int
    best_events: int
    cached: int
    ttft_s: float
    ok: bool


def cost_model(found: Sequence[prefix_trace.Session], limits: EngineLimits) -> EngineCostModel:
    """What the operator would have learned of these sessions."""
    ideal, prompts, cached, outputs = prefix_trace.IdealCache(), [], [], []
    turns = [(turn.at_s, session, number) for session in found for number, turn in enumerate(session.turns)]
    for _, session, number in sorted(turns, key=lambda one: one[0]):
        responses = [" ".join(["w100"] * turn.output) for turn in session.turns]
        token_ids = prefix_trace.prompt_tokens(prefix_trace.body(session, number, responses[:number]))
        prompts.append(len(token_ids))
        cached.append(ideal.hits(token_ids))
        outputs.append(session.turns[number].output)
        ideal.add(token_ids)
    mix = from_samples(prompts, cached, outputs)
    return engine_cost_model(TierSpec(Role.SERVE, MODEL, mix, limits, CLASSES[0].slo), CLASSES)


class EventBelief(PrefixIndex):
    """A gateway's index whose beliefs about engines are those of their KV events; it has the ring of the usual one.

    A held part of the prompt is the nearest number of the gateway's blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depths: dict[int, Mapping[str, int]] = {}

    def believe(self, request: AdmissionRequest, held: Mapping[str, int]) -> None:
        """Say what engines hold of a prompt, in tokens, before it is submitted."""
        if blocks := request.block_hashes:
            per_block = request.prompt_tokens / len(blocks)
            self._depths[blocks[-1]] = {
                engine: min(round(tokens / per_block), len(blocks)) for engine, tokens in held.items()
            }

    def match_depth(self, block_hashes: Sequence[int]) -> int:
        return max(self._depths[block_hashes[-1]].values())

    def match_depth_at(self, address: str, block_hashes: Sequence[int], max_depth: int) -> int:
        return min(self._depths[block_hashes[-1]][address], max_depth)

    def cached_on(self, block_hashes: Sequence[int], depth: int) -> str | None:
        depths = self._depths[block_hashes[-1]]
        return max(depths, key=lambda engine: depths[engine])


class Gateway:
    """Admission control of one gateway in real time. share: of every engine, that it may use. events: whether its index
    is that of KV events.
    """

    def __init__(
        self, model: EngineCostModel, engines: Sequence[str], share: float, *, prefix_aware: bool, events: bool = False
    ) -> None:
        self._control = AdmissionController(CLASSES, model, {})
        self._events = EventBelief() if events else None
        if self._events is not None:
            self._control.pool._prefix_index = self._events
        self._prefix_aware = prefix_aware
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._control.set_replicas(dict.fromkeys(engines, max(1, int(model.batch * share))), time.monotonic())
        self._engines = engines

    def request(self, name: str, document: Mapping[str, Any], prompt: int) -> AdmissionRequest:
        """The request as the gateway reads its body. prompt: its tokens, as estimates are once they are corrected."""
        parsed = parse_body(json.dumps(document).encode())
        assert isinstance(parsed, ParsedRequest)
        blocks = block_hashes(parsed.prompt_prefix)
        output = document["max_tokens"]
        return AdmissionRequest(
            name, "chat", "", time.monotonic(), prompt, max_tokens=output, body_hash=hash(name), block_hashes=blocks,
            is_stream=True,
        )  # fmt: skip

    def believed(self, request: AdmissionRequest, held: Mapping[str, int]) -> dict[str, int]:
        """Cached tokens of the request at each engine, as the index has them. held: as KV events have them."""
        if self._events is not None:
            self._events.believe(request, held)
        index, blocks = self._control.pool._prefix_index, request.block_hashes
        depth = index.match_depth(blocks) if blocks else 0
        return {
            engine: prefix_tokens(request, index.match_depth_at(engine, blocks, depth)) if depth else 0
            for engine in self._engines
        }

    async def pick(self, request: AdmissionRequest) -> str:
        """The engine. Raises RuntimeError for a request that is rejected."""
        if not self._prefix_aware:
            request.block_hashes = ()
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._take([self._control.submit(request, time.monotonic())])
        engine: str = await future
        return engine

    def complete(self, name: str, output: int, ttft_s: float) -> None:
        """A response has ended."""
        now = time.monotonic()
        self._control.complete(name, now, output, ttft_s)
        self._take(self._control.release(now))

    async def tick(self) -> None:
        """As the gateway does each second, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._control.tick(now, CapacityAnnouncement())
            self._take(self._control.release(now))

    def _take(self, decisions: Sequence[AdmissionDecision]) -> None:
        for decision in decisions:
            if decision.outcome is AdmissionOutcome.QUEUED:
                continue
            future = self._waiting.pop(decision.request_id)
            if decision.outcome is AdmissionOutcome.ADMITTED:
                assert decision.address is not None
                future.set_result(decision.address)
            else:
                future.set_exception(RuntimeError(f"the gateway rejected a request: {decision.outcome.value}"))


class Replay:
    """Sessions through gateways to engines. urls and readers are by the engine's name."""

    def __init__(
        self, gateways: Sequence[Gateway], urls: Mapping[str, str], readers: Mapping[str, EventReader]
    ) -> None:
        self._gateways, self._urls, self._readers = gateways, urls, readers
        self._ideal, self._random = prefix_trace.IdealCache(), Random(3)
        self._count = 0
        self.outcomes: list[Outcome] = []

    async def run(self, found: Sequence[prefix_trace.Session]) -> None:
        """Returns after the last response."""
        began = time.monotonic()
        async with client.session() as http:
            tickers = [asyncio.create_task(gateway.tick()) for gateway in self._gateways]
            try:
                await asyncio.gather(*(self._session(http, session, began) for session in found))
            finally:
                for ticker in tickers:
                    ticker.cancel()

    async def _session(self, http: aiohttp.ClientSession, session: prefix_trace.Session, began: float) -> None:
        responses: list[str] = []
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(max(0.0, began + turn.at_s - time.monotonic()))
            responses.append(await self._turn(http, session.kind, prefix_trace.body(session, number, responses)))

    async def _turn(self, http: aiohttp.ClientSession, kind: str, document: dict[str, Any]) -> str:
        gateway = self._random.choice(self._gateways)
        self._count += 1
        name, token_ids = f"r{self._count}", prefix_trace.prompt_tokens(document)
        ideal = self._ideal.hits(token_ids)
        self._ideal.add(token_ids)
        began = time.monotonic()
        request = gateway.request(name, document, len(token_ids))
        held = {one: reader.index.hits(token_ids, prefix_trace.ENGINE_BLOCK) for one, reader in self._readers.items()}
        believed = gateway.believed(request, held)
        engine = await gateway.pick(request)
        seen = await stream_chat(http, self._urls[engine], document)
        gateway.complete(name, max(1, seen["tokens"]), seen["first_s"] or 0.0)
        self._ideal.add(token_ids + prefix_trace.tokens(seen["text"]))
        ttft_s = (seen["first_s"] or 0.0) + seen["sent_at"] - began
        best = max(held.values(), default=0)
        self.outcomes.append(
            Outcome(
                kind, engine, seen["prompt"], ideal, believed[engine], held.get(engine, 0), best, seen["cached"],
                round(ttft_s, 4), seen["ok"] and seen["prompt"] == len(token_ids),
            )
        )  # fmt: skip
        return str(seen["text"])


async def stream_chat(http: aiohttp.ClientSession, url: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """One streamed chat: its text, seconds to the first token, and `usage`."""
    sent_at, done = time.monotonic(), False
    text: list[str] = []
    first_s: float | None = None
    usage: dict[str, Any] = {}
    async with http.post(url + _CHAT, json=document) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                content = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if content:
                    first_s = time.monotonic() - sent_at if first_s is None else first_s
                    text.append(content)
    details = usage.get("prompt_tokens_details") or {}
    return {
        "sent_at": sent_at,
        "text": "".join(text),
        "first_s": first_s,
        "prompt": usage.get("prompt_tokens", 0),
        "cached": details.get("cached_tokens") or 0,
        "tokens": usage.get("completion_tokens", 0),
        "ok": done and first_s is not None,
    }


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Hits, TTFT and the errors of both beliefs. Raises ValueError without outcomes."""
    if not outcomes:
        raise ValueError("no request was sent")
    ttft_s, ideal = [row.ttft_s for row in outcomes], sum(row.ideal for row in outcomes)
    kinds = sorted({row.kind for row in outcomes})
    return {
        "requests": len(outcomes),
        "failed": sum(not row.ok for row in outcomes),
        "prompt_tokens": sum(row.prompt for row in outcomes),
        "ideal_tokens": ideal,
        "hits_of_ideal": _share(sum(row.cached for row in outcomes), ideal),
        "hits_of_ideal_by_kind": {kind: _of_ideal([row for row in outcomes if row.kind == kind]) for kind in kinds},
        "p50_ttft_s": round(float(np.quantile(ttft_s, 0.5)), 4),
        "p95_ttft_s": round(float(np.quantile(ttft_s, 0.95)), 4),
        "requests_by_engine": {
            engine: sum(row.engine == engine for row in outcomes) for engine in sorted({row.engine for row in outcomes})
        },
        "index": _errors(outcomes, [row.index for row in outcomes]),
        "events": _errors(outcomes, [row.events for row in outcomes]),
        "missed_of_ideal": _share(sum(max(0, row.best_events - row.cached) for row in outcomes), ideal),
    }


def _of_ideal(rows: Sequence[Outcome]) -> float | None:
    return _share(sum(row.cached for row in rows), sum(row.ideal for row in rows))


def _errors(outcomes: Sequence[Outcome], believed: Sequence[int]) -> dict[str, Any]:
    """The belief against what the engine counted, in tokens: mean absolute error, and shares of far-off requests."""
    errors = [belief - row.cached for row, belief in zip(outcomes, believed, strict=True)]
    cached = sum(row.cached for row in outcomes)
    return {
        "predicted_of_cached": _share(sum(believed), cached),
        "mean_abs_error_tokens": round(sum(map(abs, errors)) / len(errors), 1),
        "too_high": _share(sum(error > FAR_TOKENS for error in errors), len(errors)),
        "too_low": _share(sum(error < -FAR_TOKENS for error in errors), len(errors)),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The outcomes as JSON."""
    return [asdict(row) for row in outcomes]
