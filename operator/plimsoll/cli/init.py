"""`plimsoll init`: prints the manifest of a new service, sized by `plan` for a model, an SLO and a workload.

It needs no cluster. What the options do not say is asked if the input is a terminal; questions go to standard error, so
that the manifest can be piped into kubectl.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any, Final

import yaml
from pydantic import ValidationError

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import ModelSource, parse
from plimsoll.api.v1alpha1.validation_messages import format_errors
from plimsoll.cli import plan, plan_manifest, plan_output
from plimsoll.cli.manifests import service_name
from plimsoll.cli.output_files import print_text
from plimsoll.core.engine_model.roofline import ACCELERATORS
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanFailure
from plimsoll.core.units import format_rate, format_seconds
from plimsoll.sim.errors import BadInput

Ask = Callable[[str], str]

_HUB: Final = "hf://"
_NAMESPACE: Final = re.compile(r"(?!.{64})[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_QUESTIONS: Final = (
    ("ttft", "TTFT target, such as 500ms", "500ms", str),
    ("tpot", "TPOT target, such as 50ms", "50ms", str),
    ("rate", "highest arrival rate in requests/s", None, float),
    ("prompt_tokens", "mean prompt length in tokens", None, float),
    ("output_tokens", "mean output length in tokens", None, float),
)
_SLO_FIELDS: Final = (
    ("ttft", "ttft"),
    ("ttft_per_k_token", "ttftPerKToken"),
    ("tpot", "tpot"),
    ("e2e", "e2e"),
    ("itl", "itl"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print the manifest. Returns exit status 0, or 1 if no number of replicas meets the SLO. Raises BadInput."""
    if arguments.namespace is not None and not _NAMESPACE.fullmatch(arguments.namespace):
        raise BadInput(
            f"--namespace: {arguments.namespace} must be the name of a namespace: lower-case letters, digits and '-', "
            "63 at most"
        )
    complete(arguments, _ask_terminal if sys.stdin.isatty() else None)
    result, simulation = plan.plan_for(arguments)
    if isinstance(result, PlanFailure):
        print("\n".join(plan_output.infeasible_lines(result)), file=sys.stderr)
        return 1
    print_text(document(result, arguments))
    if plan.misses_slo(result, simulation):
        print("plimsoll: the simulated fleet misses the SLO: see plimsoll plan with these options", file=sys.stderr)
        return 1
    return 0


def complete(arguments: argparse.Namespace, ask: Ask | None) -> None:
    """Set the options that follow from others or from answers. ask: None if nobody can answer. Raises BadInput."""
    if arguments.uri is None and arguments.model is not None and _HUB_NAME.fullmatch(arguments.model):
        arguments.uri = f"{_HUB}{arguments.model}"
    if arguments.uri is None:
        if ask is None:
            raise BadInput("--uri is required: the location of the weights, such as hf://Qwen/Qwen3-8B")
        arguments.uri = _answer(ask, "location of the weights, such as hf://Qwen/Qwen3-8B", None)
    try:
        ModelSource(uri=arguments.uri)
    except ValidationError as error:
        raise BadInput("; ".join(f"--{problem}" for problem in format_errors(error))) from None
    if arguments.hardware is None:
        if arguments.model is None and arguments.uri.startswith(_HUB):
            arguments.model = arguments.uri.removeprefix(_HUB)
        if arguments.model is None and ask is not None:
            arguments.model = _answer(ask, "model name such as Llama-3.1-8B, or the path of a config.json", None)
        if arguments.gpu is None and ask is not None:
            arguments.gpu = _answer(ask, f"GPU ({', '.join(ACCELERATORS)})", None)
    if ask is not None:
        _ask_targets_and_load(arguments, ask)


def document(result: FleetPlan, arguments: argparse.Namespace) -> str:
    """Return the manifest as YAML, after comments with the plan. Raises InvalidSpec, which names the field."""
    engine = plan_manifest.engine_manifest(result, arguments) or {}
    words = [*engine.pop("args", ()), *_format_arguments(arguments)]
    slo = {field: value for name, field in _SLO_FIELDS if (value := getattr(arguments, name)) is not None}
    percentile = {} if arguments.percentile == 95 else {"percentile": arguments.percentile}
    spec: dict[str, Any] = {"model": {"uri": arguments.uri}, "slo": {**percentile, **slo}}
    if engine or words:
        spec["engine"] = {**engine, **({"args": words} if words else {})}
    selector = _node_selector(arguments.node_selector or ())
    pod = {"pod": {"nodeSelector": selector}} if selector else {}
    chosen = result.chosen
    spec["tiers"] = {
        str(tier.role): {"minReplicas": 1, "maxReplicas": _bound(replicas), "gpus": machine.gpus, **pod}
        for tier, replicas, machine in zip(chosen.tiers, chosen.replicas, chosen.machines, strict=True)
    }
    name = arguments.name or service_name(arguments.uri.rstrip("/").rpartition("/")[2])
    meta = {"name": name, **({"namespace": arguments.namespace} if arguments.namespace else {})}
    manifest = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": meta, "spec": spec}
    parse({**manifest, "metadata": {"namespace": "default", **meta}})
    comments = _comments(result, arguments, has_selector=bool(selector))
    return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(manifest, sort_keys=False, width=120)


def _comments(result: FleetPlan, arguments: argparse.Namespace, *, has_selector: bool) -> list[str]:
    chosen, times = result.chosen, result.expected_latency
    parts = [
        f"{count} x {machine.gpus} GPU {tier.role}"
        for tier, count, machine in zip(chosen.tiers, chosen.replicas, chosen.machines, strict=True)
    ]
    known = [
        f"p95 {name} {format_seconds(seconds)}"
        for name, seconds in (("TTFT", times.p95_ttft_s), ("TPOT", times.p95_tpot_s))
        if seconds is not None
    ]
    lines = [
        f"Plan for {format_rate(result.request.rate_per_s)}: {' + '.join(parts)}"
        f" on {arguments.hardware or arguments.gpu}; {', '.join(known)}.",
        f"They carry up to {format_rate(chosen.slo_capacity_per_s)} within the SLO.",
        "The autoscaler chooses between minReplicas and maxReplicas, which is above the plan.",
    ]
    if not chosen.machines[0].from_profile:
        lines.append("Step times are estimates from data sheets: compare the plan with `plimsoll status`.")
    if not has_selector:
        lines.append("Where the cluster has other GPUs as well, name the nodes: --node-selector LABEL=VALUE.")
    return lines


def _format_arguments(arguments: argparse.Namespace) -> list[str]:
    """vLLM's arguments for the formats of weights and KV cache that were planned."""
    words = ["--quantization", "fp8"] if arguments.weights == "fp8" else []
    return [*words, *(["--kv-cache-dtype", "fp8"] if arguments.kv_cache == "fp8" else [])]


def _bound(replicas: int) -> int:
    """Return the upper bound of a tier: half more replicas than planned, at least one more."""
    return replicas + max(1, replicas // 2)


def _node_selector(pairs: tuple[str, ...] | list[str]) -> dict[str, str]:
    for pair in pairs:
        if not re.fullmatch(r"[^=]+=[^=]*", pair):
            raise BadInput(f"--node-selector: {pair!r} must be LABEL=VALUE")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def _ask_targets_and_load(arguments: argparse.Namespace, ask: Ask) -> None:
    has_target = any(getattr(arguments, name) is not None for name in ("ttft", "tpot", "e2e"))
    for name, question, default, convert in _QUESTIONS:
        is_answered = has_target if name in ("ttft", "tpot") else arguments.trace is not None
        if not is_answered and getattr(arguments, name) is None:
            text = _answer(ask, question, default)
            try:
                setattr(arguments, name, convert(text))
            except ValueError:
                raise BadInput(f"{question}: {text!r} is not a number") from None


def _answer(ask: Ask, question: str, default: str | None) -> str:
    """Return an answer, or the default for an empty one. Raises BadInput if there is neither."""
    text = ask(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
    if not text:
        raise BadInput(f"no answer: {question}")
    return text


def _ask_terminal(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()
