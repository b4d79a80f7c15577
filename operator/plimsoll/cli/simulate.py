"""`plimsoll simulate`: runs a trace against a simulated service in virtual time, with Plimsoll's or another policy.

It needs no cluster. The manifest is that of the cluster. A hardware profile gives the engine's performance; engine
arguments in the manifest override its limits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, TextIO, cast

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.cli import simulate_output
from plimsoll.cli.manifests import load_documents
from plimsoll.cli.output import Screen
from plimsoll.cli.output_files import ensure_distinct, open_for_writing, print_text, truncate
from plimsoll.cli.simulate_output import PolicyRun
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.engines import vllm
from plimsoll.sim import frontier, profile, startup, trace
from plimsoll.sim.attempt import Attempt, TraceRequest
from plimsoll.sim.clients import RetryBehavior
from plimsoll.sim.errors import BadInput
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Bounds, Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.options import parse_replicas
from plimsoll.sim.result import RunResult, decision_rows, replica_rows
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.screening import SearchSpace
from plimsoll.sim.simulator import Simulator
from plimsoll.sim.timeline import Timeline

_LIMIT_FLAGS: Final = {
    vllm.MAX_NUM_SEQS: "max_num_seqs",
    vllm.MAX_NUM_BATCHED_TOKENS: "budget",
    vllm.BLOCK_SIZE: "block_size",
    vllm.MAX_MODEL_LEN: "max_model_len",
}
_HASH_BLOCK_TOKENS: Final = 512  # prompt tokens per hash_id of a trace
_MAX_UNKNOWN_LISTED: Final = 10  # unknown priorities to print
_AUTO_VALUES: Final = ("auto", "-1")  # vLLM chooses the value
_MAX_TOKENS: Final = 10**12  # largest engine limit
_MAX_GATEWAYS: Final = 1000
_PROGRESS_INTERVAL_S: Final = 5.0  # between two progress lines


def run(arguments: argparse.Namespace) -> int:
    service = _load_service(arguments.service)
    requests = _load_requests(arguments)
    _report_unknown_classes(requests, [one.name for one in service.classes], sys.stderr)
    plant = _make_plant(arguments, service, requests)
    bounds = {Role(name): tier.replica_bounds for name, tier in service.spec.sized_tiers.items()}
    policies = arguments.policy or ["plimsoll"]
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    context = PolicyContext(bounds, plant, slo, plant.gpus, requests, service.spec.takes_requests)
    config = RunConfig(
        _initial_replicas(arguments.initial, bounds),
        requests[-1].at_s,
        arguments.gateways,
        arguments.seed,
        retry_behavior=RetryBehavior(arguments.clients),
        max_gpus=arguments.max_gpus,
    )
    space = SearchSpace(context, config.initial, config.end_s)
    for text in policies:
        own = _validate_policy(text, space)
        _check_gpus(text, own, plant.gpus, config.max_gpus)
        if arguments.initial is not None and own != config.initial:
            print(f"--initial does not apply to --policy {text}, which sets its own replicas", file=sys.stderr)
    output_paths = _output_paths(arguments, policies, plant)

    run_by_policy: dict[str, PolicyRun] = {}
    progress = _Progress(sys.stderr)

    def run_policy(text: str, files: _OutputFiles = _NO_OUTPUT_FILES) -> PolicyRun:
        policy = registry.parse(text, context)
        policy_config = config if policy.initial_replicas is None else replace(config, initial=policy.initial_replicas)
        tracked = progress.track(requests, text, policy)
        run_by_policy[text] = _simulate_policy(
            service, plant, text, policy, policy_config, tracked, files, arguments.output == "html"
        )
        return run_by_policy[text]

    run_many = frontier.runner(lambda text, seed: run_policy(text).summary)
    with contextlib.ExitStack() as open_files:
        files = _OutputFiles(
            *(None if path is None else open_files.enter_context(open_for_writing(path)) for path in output_paths)
        )
        expanded = [each for text in policies for each in frontier.expand(text, space, run_many, (config.seed,))]
        for file in files:
            if file is not None:
                truncate(file)
        runs = [
            run_by_policy[text] if text in run_by_policy and files == _NO_OUTPUT_FILES else run_policy(text, files)
            for text in expanded
        ]
    print_text(_render_results(runs, slo, arguments))
    return 0


def _render_results(runs: Sequence[PolicyRun], slo: Slo | None, arguments: argparse.Namespace) -> str:
    """Return the output of the runs."""
    summaries = [run.summary for run in runs]
    if arguments.output == "json":
        return json.dumps(summaries if len(summaries) > 1 else summaries[0], indent=2) + "\n"
    if arguments.output == "html":
        title = f"{Path(arguments.trace).name} against {Path(arguments.service).name} on {arguments.hardware}"
        return simulate_output.html_page(runs, slo, title)
    return "\n".join([*simulate_output.table_lines(summaries, Screen.for_stream(sys.stdout)), ""])


def _initial_replicas(text: str | None, bounds: Bounds) -> Mapping[Role, int]:
    """Return the ready replicas at the start, by default minReplicas of each tier. Raises BadInput."""
    if text is None:
        return {role: least for role, (least, _) in bounds.items()}
    counts = parse_replicas(text.split(","), bounds, "--initial")
    for role, count in counts.items():
        if count > (most := bounds[role][1]):
            raise BadInput(f"--initial: {count} {role} replicas exceed the manifest's maxReplicas, {most}")
    return counts


class _ComparisonParsed(Exception):
    """Raised at the first runs of a comparison, after its options have been parsed."""


def _validate_policy(text: str, space: SearchSpace) -> Mapping[Role, int]:
    """Return the initial replicas of a policy. Raises BadInput if the policy is invalid.

    A comparison is expanded for a single request, which takes no time.
    """
    if not frontier.is_comparison(text):
        return registry.parse(text, space.context).initial_replicas or space.initial
    requests = [replace(one, at_s=0.0) for one in (space.context.requests or ())[:1]]
    single_request_space = SearchSpace(replace(space.context, requests=requests), space.initial, 0.0)

    def run_many(runs: Sequence[tuple[str, int]]) -> Sequence[frontier.RunSummary]:
        for word, _ in runs:
            registry.parse(word, single_request_space.context)
        raise _ComparisonParsed

    with contextlib.suppress(_ComparisonParsed):
        frontier.expand(text, single_request_space, run_many)
    return space.initial


def _check_gpus(text: str, initial: Mapping[Role, int], gpus: Mapping[Role, int], max_gpus: int | None) -> None:
    """Raise BadInput if the initial replicas of a policy need more than `max_gpus`."""
    if max_gpus is None or sum(count * gpus[role] for role, count in initial.items()) <= max_gpus:
        return
    parts = (
        f"{n} {role} replicas of {gpus[role]} GPU{'' if gpus[role] == 1 else 's'} each" for role, n in initial.items()
    )
    raise BadInput(f"--max-gpus: {max_gpus} are too few for the initial {' and '.join(parts)} of --policy {text}")


class _OutputFiles(NamedTuple):
    """Output files of the rows; None for no file."""

    requests: TextIO | None = None
    replicas: TextIO | None = None
    windows: TextIO | None = None
    decisions: TextIO | None = None


_NO_OUTPUT_FILES: Final = _OutputFiles()


def _output_paths(arguments: argparse.Namespace, policies: Sequence[str], plant: Plant) -> Sequence[str | None]:
    """Return the paths of `_OutputFiles`. Raises BadInput for several policies, and OutputFileError."""
    paths = [getattr(arguments, f"{name}_out") for name in _OutputFiles._fields]
    output_files = [
        (f"--{name}-out", path) for name, path in zip(_OutputFiles._fields, paths, strict=True) if path is not None
    ]
    if output_files and (len(policies) > 1 or frontier.may_expand(policies[0])):
        raise BadInput("--requests-out, --replicas-out, --windows-out and --decisions-out need a single policy")
    input_files = [("--trace", arguments.trace), ("--service", arguments.service)]
    if arguments.hardware.endswith(".json"):  # not a built-in profile
        input_files.append(("--hardware", arguments.hardware))
    if plant.startup.samples_s:
        input_files.append(("--start-up", arguments.start_up))
    if arguments.model_config is not None:
        input_files.append(("--model-config", arguments.model_config))
    ensure_distinct(input_files, output_files)
    return paths


def _simulate_policy(
    service: InferenceService,
    plant: Plant,
    text: str,
    policy: SimulatedPolicy,
    config: RunConfig,
    requests: Iterable[TraceRequest],
    files: _OutputFiles,
    with_timeline: bool,
) -> PolicyRun:
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    started = time.perf_counter()
    timeline = Timeline(config.end_s)
    result = RunResult(plant, config.initial, slo, files.requests, files.windows, service.classes)

    def on_attempt_end(attempt: Attempt) -> None:
        result.add(attempt)
        timeline.add(attempt, result.is_within_slo(attempt))

    simulator = Simulator(service, plant, policy, config, on_attempt_end if with_timeline else result.add)
    simulator.run(requests)
    if files.replicas is not None:
        files.replicas.writelines(json.dumps(row) + "\n" for row in replica_rows(simulator))
    if files.decisions is not None:
        files.decisions.writelines(json.dumps(row) + "\n" for row in decision_rows(simulator))
    summary = result.summary(simulator, text, config.seed, config.end_s, time.perf_counter() - started)
    counts = {role: [one for one in simulator.log.replicas if one[1] is role] for role in simulator.tiers}
    return PolicyRun(
        summary,
        list(timeline.points()),
        {
            role: [(at_s, desired, ready) for at_s, _, desired, ready, *_ in rows if at_s <= config.end_s]
            for role, rows in counts.items()
        },
    )


class _Progress:
    """Prints the progress of a run, or of the runs of a search, every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._runs, self._reported_s = stream, 0, time.monotonic()

    def track(self, requests: Sequence[TraceRequest], text: str, policy: SimulatedPolicy) -> Iterator[TraceRequest]:
        """Yield the requests of a run and report progress.

        It also wraps `policy.desired_replicas`, because the trace may have hours without a request.
        """
        self._runs += 1
        run, done_count, length_s = f"run {self._runs}, {text}", 0, max(requests[-1].at_s, 1e-9)
        desired_replicas = policy.desired_replicas

        def report(now_s: float) -> None:
            if time.monotonic() - self._reported_s > _PROGRESS_INTERVAL_S:
                self._reported_s = time.monotonic()
                done = f"{done_count:,} of {len(requests):,} requests, {min(1.0, now_s / length_s):.0%} of the time"
                print(f"{run}: {done}", file=self._stream, flush=True)

        def observed(observation: Observation) -> Mapping[Role, int]:
            report(observation.now_s)
            return desired_replicas(observation)

        def tracked_requests() -> Iterator[TraceRequest]:
            nonlocal done_count
            for one in requests:
                report(one.at_s)
                yield one
                done_count += 1

        policy.desired_replicas = observed  # type: ignore[method-assign]
        return tracked_requests()


def _load_service(path: str) -> InferenceService:
    """Return the only service of a manifest. Raises InvalidSpec and BadInput."""
    candidates = [one for one in load_documents(path) if isinstance(one, dict) and one.get("kind") == labels.KIND]
    services = _without_fallbacks(candidates)
    if len(services) != 1:
        raise BadInput(f"{path}: must contain one {labels.KIND}, not {len(services)}")
    metadata = services[0].get("metadata")
    if not isinstance(metadata, dict):
        raise BadInput(f"{path}: metadata: must contain the name of the service")
    service = parse({**services[0], "metadata": {"namespace": "default", **metadata}})
    if service.fallback is not None:
        fallback_name = service.fallback[1]
        print(
            f"the fallback {fallback_name} is not simulated: its requests count as downgraded and as SLO misses",
            file=sys.stderr,
        )
    return service


def _without_fallbacks(services: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the services that are not a fallback of another service in the manifest."""

    def value_at(one: object, *keys: str) -> object:
        for key in keys:
            one = one.get(key) if isinstance(one, dict) else None
        return one

    fallback_names = [
        name for one in services if (name := value_at(one, "spec", "admission", "fallback", "name")) is not None
    ]
    return (
        [one for one in services if value_at(one, "metadata", "name") not in fallback_names]
        if len(services) > 1
        else list(services)
    )


def _load_requests(arguments: argparse.Namespace) -> list[TraceRequest]:
    for name, value in (("--from", arguments.from_s), ("--seed", arguments.seed)):
        if value < 0:
            raise BadInput(f"{name}: {format_number(value)} must not be below 0")
    if not 0.0 < arguments.rate_scale < 1000.0:
        raise BadInput(f"--rate-scale: {format_number(arguments.rate_scale)} must be above 0 and below 1000")
    trace_requests = trace.read(Path(arguments.trace))
    scaled_requests = trace.scale_rate(trace_requests, arguments.rate_scale, Random(arguments.seed))
    if not scaled_requests:
        raise BadInput(
            f"--rate-scale: {format_number(arguments.rate_scale)} leaves none of the "
            f"{len(trace_requests):,} requests of the trace"
        )
    requests = trace.clip(scaled_requests, arguments.from_s, arguments.to_s)
    if not requests:
        raise BadInput(
            f"--from {format_number(arguments.from_s)} --to {format_number(arguments.to_s)}: "
            "the trace has no request in this interval"
        )
    return requests


def _report_unknown_classes(requests: Sequence[TraceRequest], known_classes: Collection[str], stream: TextIO) -> None:
    """Print the priorities of a trace that are no class of the service; the default class applies to them."""
    unknown = Counter(
        one.request_class for one in requests if one.request_class and one.request_class not in known_classes
    )
    for name, count in sorted(unknown.items())[:_MAX_UNKNOWN_LISTED]:
        print(
            f"priority {name!r} of {count:,} requests is not a class of the service; they use the default class",
            file=stream,
        )


def _make_plant(arguments: argparse.Namespace, service: InferenceService, requests: Sequence[TraceRequest]) -> Plant:
    hardware_profile, tiers = profile.load(arguments.hardware), service.spec.sized_tiers
    limits = {} if "serve" in tiers else {"block_size": vllm.DISAGGREGATED_BLOCK_TOKENS}
    limits |= _stated_limits(service.spec.engine.args)
    hardware_profile = replace(hardware_profile, **cast(Any, limits))
    if (
        hardware_profile.max_num_seqs > hardware_profile.budget
        or hardware_profile.block_size > hardware_profile.kv_tokens
    ):
        raise BadInput(
            "engine limits: max-num-seqs exceeds max-num-batched-tokens, or the block size exceeds the KV cache"
        )
    for name, value, least in (("--plant-scale", arguments.plant_scale, 1e-6), ("--noise", arguments.noise, 0.0)):
        if not least <= value < 1000.0:
            raise BadInput(f"{name}: {format_number(value)} must be at least {format_number(least)} and below 1000")
    if not 0.0 <= arguments.spread < 1.0:
        raise BadInput(f"--spread: {format_number(arguments.spread)} must be at least 0 and below 1")
    for name, count in (("--gateways", arguments.gateways), ("--max-gpus", arguments.max_gpus)):
        if count is not None and count < 1:
            raise BadInput(f"{name}: must be at least 1")
    if arguments.gateways > _MAX_GATEWAYS:
        raise BadInput(f"--gateways: must be at most {_MAX_GATEWAYS:,}")
    lora = service.lora
    return Plant(
        hardware_profile,
        startup.parse(arguments.start_up),
        scale=arguments.plant_scale,
        spread=arguments.spread,
        noise=arguments.noise,
        hash_block_tokens=_HASH_BLOCK_TOKENS if any(one.block_ids for one in requests) else 0,
        config=_model_config(arguments.model_config),
        gpus={Role(name): tier.replica_gpus for name, tier in tiers.items()},
        max_adapters=0 if lora is None else lora.loras,
    )


def _stated_limits(args: Sequence[object]) -> dict[str, int]:
    """Return the limits that the user's engine arguments set."""
    stated = vllm.flag_values(args)
    limits: dict[str, int] = {}
    for flag, limit in _LIMIT_FLAGS.items():
        if (value := stated.get(flag, "auto")) in _AUTO_VALUES:
            continue
        count = vllm.parse_count(value)
        if not count or count > _MAX_TOKENS:
            raise BadInput(f"spec.engine.args: {flag} {value} must be an integer of at least 1")
        limits[limit] = count
    return limits


def _model_config(path: str | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    config = profile.document(path)
    if not isinstance(config, dict):
        raise BadInput(f"{path}: is not a JSON object")
    return config
