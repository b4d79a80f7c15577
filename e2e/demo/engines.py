"""The run on real vLLM: one prefill and one decode engine on this machine's CPU, and proof that the KV cache moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import yaml

from e2e.cluster.settings import ROOT
from e2e.demo import trace
from e2e.demo.figures import Targets
from e2e.demo.observer import RunObservations, observe_load
from e2e.demo.prompts import plan_load
from e2e.demo.stages import StageReport
from e2e.lib import stack, tool_calls
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Arrival, Load, OpenLoop, unique_text
from e2e.lib.metrics import GatewayClient, prompt_sources
from e2e.lib.request_log import RequestRecord
from e2e.lib.service import MODEL_URI, Service

ENGINES_RUN: Final = "engines"
NAME: Final = "chat"
MANIFEST: Final = ROOT / "crds" / "examples" / "prefill-decode.yaml"
TARGETS: Final = Targets(ttft_s=5.0, tpot_s=0.300)
CALIBRATION_WORDS: Final = 200
MIN_TRANSFERRED_SHARE: Final = (
    0.9  # of the trace's prompt tokens: a leg that a starved machine makes late is done locally, by design
)


def engines_manifest() -> Object:
    """The example with two tiers but for its name, the URI (no model can be downloaded here, a tiny one is in the
    engine image), and for what two cores can promise and carry: one engine a tier."""
    manifest: Object = yaml.safe_load(MANIFEST.read_text())
    manifest["metadata"]["name"] = NAME
    manifest["spec"]["model"]["uri"] = MODEL_URI
    manifest["spec"]["slo"] = {"ttft": f"{TARGETS.ttft_s:g}s", "tpot": f"{1000 * TARGETS.tpot_s:g}ms"}
    for tier in manifest["spec"]["tiers"].values():
        tier["maxReplicas"] = tier.get("minReplicas", 1)
    return manifest


def service(cluster: Cluster, namespace: str) -> Service:
    """The handle on it."""
    return Service(cluster, namespace, NAME, stack.GATEWAY_URL)


def check_transfer(chat: Service, report: StageReport) -> float:
    """Asks once, shows the stream's text and the road of its KV cache; returns bytes of text a token."""
    before = chat.metrics("decode")
    text = unique_text(CALIBRATION_WORDS, f"ask {time.time_ns()}")
    response = _send(chat, Prompt(text, max_tokens=24))
    report.check(response.ok, f"a streamed answer of {response.output_tokens} tokens in {response.events} events")
    print(f"   {response.text!r} (a random model: the words mean nothing)")
    transferred = prompt_sources(chat.metrics("decode") - before)
    print(f"   the decode tier's prompt tokens by source: {transferred}")
    report.check(
        transferred.get("external_kv_transfer") == response.prompt_tokens and not transferred.get("local_compute"),
        f"all {response.prompt_tokens} prompt tokens' KV cache moved from prefill to decode, none was computed again",
    )
    return len(text.encode()) / response.prompt_tokens


def check_tools(chat: Service, report: StageReport) -> None:
    """Asks for a forced tool call, for a tool of the model's choice, and for JSON of a schema."""
    seed = f"{time.time_ns()}"
    _, forced, _ = tool_calls.ask(chat.target, f"a {seed}", tools=tool_calls.TOOLS, tool_choice=tool_calls.NAMED)
    status, _, _ = tool_calls.ask(chat.target, f"b {seed}", tools=tool_calls.TOOLS, tool_choice="auto", max_tokens=16)
    _, shaped, _ = tool_calls.ask(chat.target, f"c {seed}", response_format=tool_calls.RESPONSE_FORMAT)
    arguments = tool_calls.called_arguments(forced) if "choices" in forced else [str(forced)]
    content = shaped["choices"][0]["message"]["content"] if "choices" in shaped else str(shaped)
    report.check(
        len(arguments) == 1 and tool_calls.is_forecast(arguments[0]), f"a forced tool call with arguments {arguments}"
    )
    report.check(status == 200, "a request with tools and tool_choice auto is accepted")
    report.check(tool_calls.is_forecast(content), f"JSON of the schema that was asked for: {content}")


def _send(chat: Service, prompt: Prompt) -> RequestRecord:
    [record] = Load(chat.target, OpenLoop([Arrival(0, prompt)]), source="demo").run().records
    return record


def run(
    chat: Service, rows: Sequence[trace.TraceRequest], bytes_per_token: float, report: StageReport
) -> tuple[RunObservations, dict[str, Any]]:
    """Sends the rows; returns what was seen, and by which roads the prompts came to the decode tier.

    What should hold and does not is in the report's `broken`.
    """
    gateway = GatewayClient(chat.cluster, stack.SYSTEM)
    before, prefill_counts = chat.metrics("decode"), gateway.prefill_counts(chat.key)
    observations = observe_load(
        chat, ENGINES_RUN, TARGETS, rows, plan_load(rows, bytes_per_token, f"{time.time_ns():x}")
    )
    transferred = prompt_sources(chat.metrics("decode") - before)
    prefill_counts = gateway.prefill_counts(chat.key) - prefill_counts
    print(f"   decode tier's prompt tokens by source: {transferred}; prefills: {dict(prefill_counts)}")
    failed = [row for row in observations.requests if row.broken or row.rejected or row.client_gone]
    outcomes = sorted({f"{row.outcome} {row.status} {row.reason}".strip() for row in failed})
    report.check_later(
        not failed, f"{len(observations.requests)} requests, {len(failed)} failed {outcomes or ''}".strip()
    )
    prompts = sum(row.prompt_tokens for row in observations.requests)
    share = transferred.get("external_kv_transfer", 0) / max(1, prompts)
    report.check_later(
        share >= MIN_TRANSFERRED_SHARE, f"{share:.1%} of the prompt tokens' KV cache moved to the decode tier"
    )
    return observations, {"prompt_tokens_by_source": transferred, "prefills": dict(prefill_counts)}
