"""The light engine is a vLLM as far as anybody can see: same requests, same counters, same answers, same refusals.

Everything else that is shown with light engines rests on this. A real vLLM on the CPU and a light engine get the same
token ids past the gateway, from inside their pods. The light one has the real one's limits, and as its speed what the
real one's own warm-up showed on this machine; how much longer a long prompt or a full batch takes must then be alike.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import pytest

from e2e.lib import remote_prefills, stack
from e2e.lib.engine_requests import CHAT, COMPLETIONS, Engine, EngineResponse, Request
from e2e.lib.kube import Cluster, Object
from e2e.lib.metrics import Samples
from e2e.lib.prober import Prober
from e2e.lib.service import API_PORT, Service, make_manifest
from e2e.lib.wait import wait_until
from plimsoll.api.contract import engine_contract
from plimsoll.core.engine_model import self_benchmark
from plimsoll.core.ports import SelfBenchmark

FACTOR = 2.0  # between the two engines' ratios; the tiny model's step has a bend or two, and two cores are never quiet
ROUNDS, TRIES = 4, 12  # of what is timed; the fastest counts: neighbours only add
SHORT, LONG = 100, 400  # prompt tokens, within one step's budget
BATCH, OUTPUTS = 4, 25
VOCABULARY = 4096  # of the tiny model
RUN = time.time_ns()  # prompts of an earlier run may lie in a cache


@dataclass(frozen=True)
class Twins:
    """The two engines."""

    real: Engine
    light: Engine

    def both(self, *bodies: Object, path: str = COMPLETIONS) -> tuple[list[EngineResponse], list[EngineResponse]]:
        """The same requests to both, one engine after the other."""
        return self.real.post(*bodies, path=path), self.light.post(*bodies, path=path)


def _profile(about: Any) -> Object:
    """What a light engine needs to be as fast as the one that said this."""
    rungs = SelfBenchmark(*(tuple(map(tuple, about["self_benchmark"][part])) for part in ("prefill", "decode")))
    model = self_benchmark.fit_step_model(rungs, about["limits"]["token_budget"])
    names = {"base": "base_s", "anypre": "any_prefill_s", "pretok": "prefill_token_s", "preattn": "prefill_pair_s"}
    names |= {"dec": "sequence_s", "ctx": "cached_token_s"}
    return {name: getattr(model, field) for name, field in names.items()}


def _light(name: str, tiers: Object, limits: Object, profile: Object) -> list[Object]:
    """A light service whose speed is in a ConfigMap."""
    mounted = {
        "volumes": [{"name": "speed", "configMap": {"name": f"{name}-speed"}}],
        "volumeMounts": [{"name": "speed", "mountPath": "/speed"}],
    }
    flags = {
        "--max-model-len": limits["max_model_len"],
        "--max-num-seqs": limits["max_sequences"],
        "--max-num-batched-tokens": limits["token_budget"],
        "--block-size": limits["block_tokens"],
        "--num-gpu-blocks-override": limits["kv_tokens"] // limits["block_tokens"],
        "--profile": "/speed/profile.json",
        "--spread": 0,
    }
    args = [str(word) for flag in flags.items() for word in flag]
    made = {role: {"gpus": 0, "pod": mounted, **tier} for role, tier in tiers.items()}
    data = {"profile.json": json.dumps(profile)}
    speed = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-speed"}, "data": data}
    return [speed, make_manifest(name, made, engine={"runtime": "simulated", "args": args})]


def _apply_light(like: Engine, name: str, tiers: Object) -> Service:
    """A light service with the limits and the speed of a real engine, Ready."""
    about, cluster, namespace = like.about(), like.service.cluster, like.service.namespace
    cluster.apply(*_light(name, tiers, about["limits"], _profile(about)), namespace=namespace)
    made = Service(cluster, namespace, name, stack.GATEWAY_URL)
    made.wait_ready()
    return made


@pytest.fixture(scope="module")
def twins(cluster: Cluster, namespace: str) -> Twins:
    """A real engine, and a light one with its limits and its speed."""
    real = Engine(Service(cluster, namespace, "real", stack.GATEWAY_URL))
    cluster.apply(make_manifest("real", {"serve": {}}), namespace=namespace)
    real.service.wait_ready()
    return Twins(real, Engine(_apply_light(real, "light", {"serve": {}})))


def _completion(seed: int, tokens: int, outputs: int, **more: Any) -> Object:
    """A completion of exactly `outputs` tokens; prompts of one seed begin alike, those of others share nothing."""
    draw = random.Random(f"{RUN} {seed}")
    prompt = [draw.randrange(5, VOCABULARY) for _ in range(tokens)]
    return {"prompt": prompt, "max_tokens": outputs, "ignore_eos": True, "temperature": 0, **more}


COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "iteration_tokens_total_sum",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
    "request_params_max_tokens_sum",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
)
LABELLED_COUNTERS = (
    ("prompt_tokens_by_source_total", "source"),
    ("request_success_total", "finished_reason"),
    ("request_prompt_tokens_bucket", "le"),
    ("request_generation_tokens_bucket", "le"),
    ("request_params_n_bucket", "le"),
)


def _counts(grown: Samples) -> Object:
    found: Object = {name: grown.total(f"vllm:{name}") for name in COUNTERS}
    return found | {name: grown.by(f"vllm:{name}", label) for name, label in LABELLED_COUNTERS}


def _counts_since(engine: Engine, requests: int, before: Samples) -> Object:
    """What the engine counted since `before`, once it has counted so many requests."""

    def counted_samples() -> Samples | None:
        grown = engine.metrics() - before
        return grown if grown.total("vllm:request_success_total") >= requests else None

    return _counts(wait_until(f"{engine.service.name} has counted {requests} requests", counted_samples))


def test_simulated_engine_counters_match_vllm(twins: Twins) -> None:
    """Prompts that are new, that are in the cache, in part and whole, and several at once."""
    again, longer = _completion(1, 300, 7), _completion(1, 420, 5)
    alone = [
        _completion(1, 300, 9),
        again,
        longer,
        _completion(2, 16, 1),
        _completion(3, 700, 16, stream=True),
        _completion(4, 1, 3),
    ]
    at_once = [_completion(10 + n, 60 + 50 * n, 8 + n) for n in range(5)]
    counts = []
    for engine in (twins.real, twins.light):
        before = engine.metrics()
        batches = [*([engine.request(body)] for body in alone), [engine.request(body) for body in at_once]]
        got = [one for batch in engine.send(*batches) for one in batch]
        assert [one.status for one in got] == [200] * len(got), [one.said for one in got]
        counts.append(_counts_since(engine, len(got), before))
    real, light = counts
    print({name: value for name, value in real.items() if name in COUNTERS})
    assert real["generation_tokens_total"] == sum(body["max_tokens"] for body in (*alone, *at_once))
    assert real["prompt_tokens_by_source_total"]["local_cache_hit"] > 0
    assert light == real


def test_simulated_engine_reading_matches_vllm(twins: Twins) -> None:
    real, light = twins.real.reading(), twins.light.reading()
    absent = [{field.name for field in fields(one) if getattr(one, field.name) is None} for one in (real, light)]
    strange = twins.light.metrics().names("vllm:") - twins.real.metrics().names("vllm:")
    print(f"not told by either: {sorted(absent[0])}")
    of_other_engines = {"all_prompt_tokens", "decode_s", "busy_s", "kv_tokens", "block_tokens"}
    unused = {"post_s", "transfer_s", "draft_tokens", "accepted_draft_tokens"}
    assert absent[0] == absent[1] == of_other_engines | unused
    for name in ("prompt_tokens", "output_tokens", "tpot_s", "ttft_s"):
        assert getattr(real, name).edges == getattr(light, name).edges, name
    assert not strange, "the light engine has metrics that vLLM has not"


def shape(value: Any) -> Any:
    """A document with the kinds of its values in their places; a list is the different shapes in it."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return _distinct(shape(one) for one in value)
    return type(value).__name__


def _distinct(shapes: Iterable[Any]) -> list[Any]:
    return [json.loads(one) for one in dict.fromkeys(json.dumps(one) for one in shapes)]


def _stream_shape(got: EngineResponse) -> Any:
    *events, done = got.events
    return [got.status, got.kind, _distinct(shape(json.loads(event)) for event in events), done]


TALK: Object = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "ignore_eos": True}


def test_simulated_engine_response_shapes_match_vllm(twins: Twins) -> None:
    for path, body in ((COMPLETIONS, _completion(20, 40, 6)), (CHAT, TALK)):
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        (real, real_stream, real_usage), (light, light_stream, light_usage) = twins.both(
            body, {**body, "stream": True}, {**body, **usage}, path=path
        )
        assert (light.status, light.kind, shape(light.json)) == (real.status, real.kind, shape(real.json))
        assert light.json["choices"][0]["finish_reason"] == real.json["choices"][0]["finish_reason"] == "length"
        assert _stream_shape(light_stream) == _stream_shape(real_stream)
        assert _stream_shape(light_usage) == _stream_shape(real_usage)
        numbers = [json.loads(one.events[-2])["usage"]["completion_tokens"] for one in (real_usage, light_usage)]
        assert numbers == [6, 6]


def test_simulated_engine_truncates_at_context_length(twins: Twins) -> None:
    """More tokens than there is room for are no error, as long as the context could hold them."""
    context = twins.real.about()["limits"]["max_model_len"]
    (real,), (light,) = twins.both(_completion(30, context - 3, 8))
    assert (real.status, light.status) == (200, 200), light.said
    assert real.json["usage"]["completion_tokens"] == light.json["usage"]["completion_tokens"] == 3


def test_simulated_engine_models_list_matches_vllm(twins: Twins) -> None:
    ((real,),), ((light,),) = (one.send([("GET", "/v1/models", {}, None)]) for one in (twins.real, twins.light))
    reported = [
        [(m["id"].split("/")[-1], m["object"], m["max_model_len"]) for m in one.json["data"]] for one in (real, light)
    ]
    assert [name for name, *_ in reported[0]] == ["real"] * len(reported[0])
    assert [rest for _, *rest in reported[0]] == [rest for _, *rest in reported[1]]
    missing = set(light.json["data"][0]) ^ set(real.json["data"][0])
    assert not missing


BAD: tuple[Object, ...] = (
    {"model": "nobody", "prompt": [7]},
    {"prompt": [7] * 5000},
    {"prompt": [7] * 4096, "max_tokens": 1},
    {"prompt": [7] * 60, "max_tokens": 9000},
    {"prompt": [7], "max_tokens": 0},
    {"prompt": [7], "max_tokens": "many"},
    {"prompt": [7], "n": 0},
    {"prompt": []},
    {"prompt": None},
    {"max_tokens": 5},
    {"prompt": [7], "max_tokens": 5, "min_tokens": 6},
    {"prompt": [7], "stream_options": {"include_usage": True}},
)


VALIDATION_ERROR = "validation error"  # words of vLLM's web framework, which nobody matches on


def _error(engine: Engine, got: EngineResponse) -> Any:
    """The error object, with the engine's own name taken out."""
    said = got.said.replace(engine.service.key, "NAMESPACE/NAME").replace(engine.service.name, "NAME")
    return json.loads(said)["error"]


def test_simulated_engine_rejects_same_requests_as_vllm(twins: Twins) -> None:
    for body, *answers in zip(BAD, *twins.both(*BAD), strict=True):
        assert answers[0].status == answers[1].status >= 400, body
        real, light = (_error(*one) for one in zip((twins.real, twins.light), answers, strict=True))
        if VALIDATION_ERROR in real["message"]:
            assert (light["type"], light["code"], light.keys()) == (real["type"], real["code"], real.keys()), body
        else:
            assert light == real, body
    broken: list[Request] = [
        ("POST", COMPLETIONS, {}, "{"),
        ("POST", "/nowhere", {}, "{}"),
        ("POST", "/v1/models", {}, "{}"),
    ]
    statuses = [[got.status for got in one.send(broken)[0]] for one in (twins.real, twins.light)]
    assert statuses[0] == statuses[1]


TRANSFER_COUNTERS = (
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "nixl_xfer_time_seconds_count",
    "nixl_post_time_seconds_count",
    "nixl_num_failed_transfers_total",
)
PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine of one service."""

    service: Service

    def move(self, *bodies: Object) -> Object:
        """What the decode engine counted while it had these prompts computed at the prefill engine."""
        prefill, decode = Engine(self.service, "prefill"), Engine(self.service, "decode")
        peer = next(p for p in self.service.pods("prefill") if p["metadata"]["name"] == prefill.pod)
        address = f"{peer['status']['podIP']}:{API_PORT}"
        before = decode.metrics()
        got = decode.post(*bodies, headers={engine_contract().headers["prefill"]: address})
        assert [one.status for one in got] == [200] * len(got), [one.said for one in got]
        counted = _counts_since(decode, len(got), before)
        grown = decode.metrics() - before
        counted |= {name: grown.total(f"vllm:{name}") for name in TRANSFER_COUNTERS}
        return counted | {"remote_prefills": remote_prefills.outcomes(grown)}

    def remote_prefill(self, body: Object) -> Any:
        """What a prefill engine tells the decode engine that asked for a prompt."""
        request_body, headers = (
            {**body, "kv_transfer_params": PREFILL_PARAMS},
            {engine_contract().headers["remote_prefill"]: "prefill"},
        )
        (got,) = Engine(self.service, "prefill").post(request_body, headers=headers)
        return got.json["kv_transfer_params"]


def test_simulated_engine_kv_transfer_matches_vllm(twins: Twins, pd: Service, prober: Prober) -> None:
    """A pair of light engines and one of real ones pass prompts on, and say the same of it."""
    light = Pair(_apply_light(twins.real, "light-pd", {"prefill": {}, "decode": {}}))
    real = Pair(pd)

    def run() -> list[Object]:
        seed, other = next(NEXT_SEED), next(NEXT_SEED)
        prompts = [_completion(seed, 300, 6), _completion(other, 700, 4), _completion(seed, 420, 5)]
        return [pair.move(*prompts) for pair in (real, light)]

    with prober.paused():
        counts = remote_prefills.first_in_time(
            run, lambda found: dict(sum((Counter(one["remote_prefills"]) for one in found), Counter()))
        )
        reported = [shape(pair.remote_prefill(_completion(next(NEXT_SEED), 200, 1))) for pair in (real, light)]
        names = [Engine(pair.service, "decode").metrics().names("vllm:nixl") for pair in (real, light)]
    print(
        {
            name: value
            for name, value in counts[0].items()
            if name in (*TRANSFER_COUNTERS, "remote_prefills", "prompt_tokens_by_source_total")
        }
    )
    assert counts[0]["remote_prefills"] == {"remote": 3}
    assert counts[1] == counts[0]
    assert reported[1] == reported[0]
    assert names[1] == names[0]


NEXT_SEED = itertools.count(1000)  # seeds that no other scenario uses


# What is timed: requests at once, prompt tokens, output tokens.
ONE_SHORT, ONE_LONG, ONE_MORE = (1, SHORT, 1), (1, LONG, 1), (1, SHORT, OUTPUTS)
FEW_SHORT, FEW_MORE = (BATCH, SHORT, 1), (BATCH, SHORT, OUTPUTS)
BATCH_SHAPES = (ONE_SHORT, ONE_LONG, ONE_MORE, FEW_SHORT, FEW_MORE)
Fastest = dict[tuple[int, int, int], float]  # seconds until all of a kind are answered


def _time(engine: Engine, fastest: Fastest) -> None:
    """Some rounds of all kinds, so that a bad moment strikes each alike."""
    kinds = BATCH_SHAPES * ROUNDS
    batches = [
        [engine.request(_completion(next(NEXT_SEED), tokens, outputs)) for _ in range(n)]
        for n, tokens, outputs in kinds
    ]
    for kind, answers in zip(kinds, engine.send(*batches), strict=True):
        took = max(got.seconds for got in answers)
        fastest[kind] = min(took, fastest.get(kind, took))


def _ratios(fastest: Fastest) -> tuple[float, float]:
    """How much longer a prompt of four times the length takes to its first token, and a token in a batch of four."""
    alone, batched = fastest[ONE_MORE] - fastest[ONE_SHORT], fastest[FEW_MORE] - fastest[FEW_SHORT]
    return fastest[ONE_LONG] / fastest[ONE_SHORT], batched / alone


def _is_similar(real: Fastest, light: Fastest) -> bool:
    pairs = zip(_ratios(real), _ratios(light), strict=True)
    return all(0 < expected / FACTOR <= found <= expected * FACTOR for expected, found in pairs)


def test_simulated_engine_relative_latency_matches_vllm(twins: Twins) -> None:
    """On a starved machine more rounds are needed: the fastest of all of them counts."""
    real: Fastest = {}
    light: Fastest = {}
    for _ in range(TRIES):
        _time(twins.real, real)
        _time(twins.light, light)
        if _is_similar(real, light):
            break
    for engine, fastest in ((twins.real, real), (twins.light, light)):
        print(f"{engine.service.name}: ratios {_ratios(fastest)} of {fastest}; {engine.about()['self_benchmark']}")
    assert _is_similar(real, light), f"real {_ratios(real)}, light {_ratios(light)}"
