"""`plimsoll profile URL|NAME`: measures an engine and writes the hardware profile that `plan` and `simulate` take.

Problem: a plan needs the step times of a model on a GPU, and few pairs of these have been measured.

Idea: the self-benchmark of the launcher, with longer prompts and larger batches, on an engine that has no other
requests. The operator's own fit makes a step model of the points. Limits that the engine does not state are options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from plimsoll.cli import cluster, output_files
from plimsoll.cli.kubeconfig import current_namespace
from plimsoll.cli.measured_engine import (
    REQUEST_TIMEOUT_S,
    Connection,
    EngineFacts,
    connect_pod,
    connect_url,
    read_facts,
    words_of,
)
from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.self_benchmark import fit_step_model
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.errors import cause_of
from plimsoll.core.ports import SelfBenchmark
from plimsoll.core.units import format_number, round_significant
from plimsoll.engines import self_benchmark, vllm
from plimsoll.engines.prompts import COMPLETIONS_PATH, PromptFactory
from plimsoll.engines.self_benchmark import BenchmarkPlan, BenchmarkSettings, SendRequest
from plimsoll.sim import profile
from plimsoll.sim.errors import BadInput

PROMPT_TOKENS: Final = (16, 128, 512, 1024, 2048)  # beyond, attention bends the line that is fitted
BATCHES: Final = (1, 4, 8, 16, 32, 64)
REPEATS: Final = 3
OUTPUT_TOKENS: Final = 16
_MAX_REQUESTS: Final = 100_000
_MAX_SECONDS: Final = 3600.0
_PROBE_TOKENS: Final = 2
_DIGITS: Final = 4  # significant ones of a coefficient
_COEFFICIENTS: Final = {
    "base": "base_s",
    "anypre": "any_prefill_s",
    "pretok": "prefill_token_s",
    "preattn": "prefill_pair_s",
    "dec": "sequence_s",
    "ctx": "cached_token_s",
}


@dataclass(frozen=True)
class Limits:
    """Limits of the engine, known or given."""

    max_sequences: int
    token_budget: int
    kv_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class Measurement:
    """points: of the self-benchmark. model: the step model that fits them. requests, seconds: what it took."""

    points: SelfBenchmark
    model: StepModel
    requests: int
    seconds: float


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the profile or write it to a file. Raises BadInput."""
    if not 1 <= arguments.requests <= _MAX_REQUESTS:
        raise BadInput(f"--requests: {arguments.requests} must be from 1 to {_MAX_REQUESTS}")
    if not 1 <= arguments.seconds <= _MAX_SECONDS:
        raise BadInput(f"--seconds: {format_number(arguments.seconds)} must be from 1 to {format_number(_MAX_SECONDS)}")
    output_files.ensure_distinct(
        [("--config", arguments.config)] if arguments.config is not None else [],
        [("--output", arguments.output)] if arguments.output is not None else [],
    )
    config = _config(arguments.config)
    if arguments.output is None:
        output_files.print_text(_measured_text(arguments, config))
        return 0
    with output_files.replacing(arguments.output) as file:
        file.write(_measured_text(arguments, config))
    return 0


def _measured_text(arguments: argparse.Namespace, config: dict[str, Any] | None) -> str:
    """Measure and report; returns the profile as JSON."""
    document, measurement = asyncio.run(_profile(arguments, config))
    print("\n".join(report_lines(measurement)), file=sys.stderr, flush=True)
    return json.dumps(document, indent=2) + "\n"


def _config(name: str | None) -> dict[str, Any] | None:
    if name is None:
        return None
    config = profile.document(name)
    if not isinstance(config, dict):
        raise BadInput(f"--config: {name}: is not a JSON object")
    try:
        roofline.model_shape(config)
    except ValueError as error:
        raise BadInput(f"--config: {name}: {error}") from None
    return config


async def _profile(arguments: argparse.Namespace, config: dict[str, Any] | None) -> tuple[dict[str, Any], Measurement]:
    async with _connect(arguments) as connection:
        facts = await read_facts(connection, arguments.model or "")
        limits = _limits(arguments, facts)
        measurement = await measure(connection, facts, limits, arguments.requests, arguments.seconds, time.monotonic)
    return profile_document(measurement, facts, limits, config), measurement


@asynccontextmanager
async def _connect(arguments: argparse.Namespace) -> AsyncIterator[Connection]:
    """Connect to the URL, or to a pod of the service."""
    if "://" in arguments.target:
        async with connect_url(arguments.target) as connection:
            yield connection
        return
    namespace = arguments.namespace or current_namespace(arguments.kubeconfig)
    async with cluster.connect(arguments.kubeconfig) as kube:
        pod = await connect_pod(kube, namespace, arguments.target)
        print(f"measuring pod {namespace}/{pod.pod}", file=sys.stderr, flush=True)
        yield pod


def _limits(arguments: argparse.Namespace, facts: EngineFacts) -> Limits:
    """The limits that are given, else those that the engine states. Raises BadInput that names the missing options."""
    found = {
        vllm.MAX_NUM_SEQS: arguments.max_num_seqs or facts.max_sequences,
        vllm.MAX_NUM_BATCHED_TOKENS: arguments.max_num_batched_tokens or facts.token_budget,
        "--kv-tokens": arguments.kv_tokens or facts.kv_tokens,
        vllm.MAX_MODEL_LEN: arguments.max_model_len or facts.max_model_len,
    }
    if negative := [option for option, value in found.items() if value is not None and value < 1]:
        raise BadInput(f"{negative[0]}: must be at least 1")
    if missing := [option for option, value in found.items() if value is None]:
        raise BadInput(f"the engine does not state these limits: give {', '.join(missing)}")
    return Limits(*(int(value) for value in found.values() if value is not None))


async def measure(
    connection: Connection,
    facts: EngineFacts,
    limits: Limits,
    max_requests: int,
    seconds: float,
    clock: Callable[[], float],
) -> Measurement:
    """Benchmark an engine without other requests, and fit a step model. Raises BadInput."""
    if facts.running:
        raise BadInput(f"the engine has {facts.running:.0f} requests: measure one without other clients")
    prompts, sent, failure, was_cut = PromptFactory(facts.model), 0, "", False

    async def send(path: str, body: bytes) -> self_benchmark.Response:
        nonlocal sent, failure, was_cut
        sent += 1
        try:
            answer = await connection.send(path, body, max(seconds, REQUEST_TIMEOUT_S))
        except (OSError, TimeoutError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        except asyncio.CancelledError:
            was_cut = True
            raise
        if answer.status != 200:
            failure = f"status {answer.status}: {answer.body[:800].decode(errors='replace')}"
        return answer

    plan = benchmark_plan(limits, max_requests - 1, seconds)
    await _probe(send, prompts)
    started = clock()
    found = await self_benchmark.run(send, plan, prompts, clock, seconds)
    points = SelfBenchmark((), ()) if found is None else SelfBenchmark(found.prefill, found.decode)
    if not points.prefill or not points.decode:
        if failure:
            raise BadInput(f"the engine answered too few requests, the last with {words_of(failure)}")
        if was_cut:
            raise BadInput(
                f"the engine answered too few requests within {format_number(seconds)} s: give more --seconds"
            )
        raise BadInput(
            f"the engine took no longer for {OUTPUT_TOKENS} tokens than for 1: measure one without other clients"
        )
    return Measurement(points, fit_step_model(points, limits.token_budget), sent, clock() - started)


def benchmark_plan(limits: Limits, max_requests: int, seconds: float) -> BenchmarkPlan:
    """The largest plan that fits the engine and the number of requests. Raises BadInput."""
    settings = BenchmarkSettings(REPEATS, OUTPUT_TOKENS, seconds)
    for count in range(len(BATCHES), 0, -1):
        plan = self_benchmark.plan_benchmark(
            settings,
            PROMPT_TOKENS,
            BATCHES[:count],
            role="serve",
            max_model_len=limits.max_model_len,
            max_sequences=limits.max_sequences,
            kv_tokens=limits.kv_tokens,
        )
        if not plan.batches:
            break
        if plan.requests <= max_requests:
            return plan
    if not plan.batches:
        raise BadInput(
            f"{vllm.MAX_MODEL_LEN}: {limits.max_model_len} is too short for a prompt and {OUTPUT_TOKENS} tokens"
        )
    raise BadInput(f"--requests: the smallest measurement needs {plan.requests + 1}")


async def _probe(send: SendRequest, prompts: PromptFactory) -> None:
    """Raises BadInput if the engine does not serve the requests of the benchmark."""
    body = prompts.completion_request(prompts.new_prompt(PROMPT_TOKENS[0]), _PROBE_TOKENS)
    try:
        response = await send(COMPLETIONS_PATH, body)
    except (OSError, TimeoutError, ValueError) as error:
        raise BadInput(f"the engine does not answer POST {COMPLETIONS_PATH}: {cause_of(error)}") from None
    if response.status != 200:
        words = words_of(response.body[:800].decode(errors="replace"))
        raise BadInput(
            f"POST {COMPLETIONS_PATH} with a prompt of token ids and ignore_eos answered {response.status}: {words}"
        )
    if (tokens := self_benchmark.generated_tokens(response.body)) != _PROBE_TOKENS:
        raise BadInput(f"the engine counted {words_of(tokens)} output tokens where {_PROBE_TOKENS} were requested")


def prefill_constant_s(measurement: Measurement, token_budget: int) -> float:
    """Seconds of a prefill that depend neither on its tokens nor on its steps: the median over the prompts."""
    model = measurement.model
    return max(
        0.0,
        statistics.median(
            seconds
            - (HTTP_OVERHEAD_PER_TOKEN_S + model.prefill_token_s) * tokens
            - model.base_s * math.ceil(tokens / token_budget)
            for tokens, seconds in measurement.points.prefill
        ),
    )


def profile_document(
    measurement: Measurement, facts: EngineFacts, limits: Limits, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The profile as JSON. config: the model's config.json; by default what the engine states. Raises BadInput.

    The constant part of a prefill counts as HTTP up to the usual time of HTTP, and beyond as a part of the step.
    """
    constant_s = prefill_constant_s(measurement, limits.token_budget)
    frontend_s = min(constant_s, HTTP_OVERHEAD_S)
    coefficients = asdict(replace(measurement.model, any_prefill_s=constant_s - frontend_s))
    seconds = {
        **{key: coefficients[name] for key, name in _COEFFICIENTS.items()},
        "frontend": frontend_s,
        "frontend_token": HTTP_OVERHEAD_PER_TOKEN_S,
    }
    document: dict[str, Any] = {
        **({"accelerator": facts.accelerator} if facts.accelerator else {}),
        **{key: round_significant(value, _DIGITS) for key, value in seconds.items()},
        "kv_tokens": limits.kv_tokens,
        "max_num_seqs": limits.max_sequences,
        "budget": limits.token_budget,
        "max_model_len": limits.max_model_len,
        **({"block_size": facts.block_tokens} if facts.block_tokens else {}),
        **_shape_keys(facts.config if config is None else config),
    }
    profile.parse(document)
    return document


def _shape_keys(config: Any) -> dict[str, Any]:
    """What a transfer of KV between engines needs of the model; nothing if it is unknown."""
    try:
        shape = roofline.model_shape(config or {})
    except ValueError:
        return {}
    return {
        "layers": shape.layers,
        "kv_bytes_per_token": round(shape.kv_bytes_per_token),
        "mixture": shape.experts > 1,
    }


def report_lines(measurement: Measurement) -> list[str]:
    """What was measured, and what the profile predicts for the same steps."""
    points, model = measurement.points, measurement.model
    lines = [
        f"{measurement.requests} requests in {measurement.seconds:.1f} s: {len(points.prefill)} prompt lengths, "
        f"{len(points.decode)} batches",
        f"{'batch':>6} {'context':>8} {'measured':>10} {'profile':>10}   ms per token",
    ]
    for sequences, context, seconds in points.decode:
        step_s = float(model.step_s(0, 0, sequences, sequences * context))
        lines.append(f"{sequences:>6} {context:>8} {seconds * 1e3:>10.2f} {step_s * 1e3:>10.2f}")
    return lines
