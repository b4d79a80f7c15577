"""The run on real vLLM: one prefill and one decode engine on this machine's CPU, and proof that the KV cache moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import yaml

from e2e.cluster.settings import ROOT
from e2e.demo import trace
from e2e.demo.asking import plan
from e2e.demo.figures import Targets
from e2e.demo.stages import Report
from e2e.demo.watch import Seen, watched
from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.ledger import Record
from e2e.lib.load import Arrival, Load, OpenLoop, unique_text
from e2e.lib.metrics import Gateway, prompt_sources
from e2e.lib.service import MODEL_URI, Service

RUN: Final = "engines"
NAME: Final = "chat"
MANIFEST: Final = ROOT / "crds" / "examples" / "prefill-decode.yaml"
TARGETS: Final = Targets(ttft_s=5.0, tpot_s=0.300)
CALIBRATION_WORDS: Final = 200
MOVED: Final = 0.9  # of the trace's prompt tokens: a leg that a starved machine makes late is done locally, by design


def engines_manifest() -> Object:
    """The README's manifest but for the URI (no model can be downloaded here, a tiny one is in the engine image), and
    for what two cores can promise and carry: one engine a tier."""
    manifest: Object = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["model"]["uri"] = MODEL_URI
    manifest["spec"]["slo"] = {"ttft": f"{TARGETS.ttft_s:g}s", "tpot": f"{1000 * TARGETS.tpot_s:g}ms"}
    for tier in manifest["spec"]["tiers"].values():
        tier["maxReplicas"] = tier["minReplicas"]
    return manifest


def service(cluster: Cluster, namespace: str) -> Service:
    """The handle on it."""
    return Service(cluster, namespace, NAME, stack.GATEWAY_URL)


def ask(chat: Service, report: Report) -> float:
    """Asks once, shows the stream's text and the road of its KV cache; returns bytes of text a token."""
    before = chat.metrics("decode")
    text = unique_text(CALIBRATION_WORDS, f"ask {time.time_ns()}")
    answer = _sent(chat, Prompt(text, max_tokens=24))
    report.check(answer.ok, f"a streamed answer of {answer.output_tokens} tokens in {answer.events} events")
    print(f"   {answer.text!r} (a random model: the words mean nothing)")
    moved = prompt_sources(chat.metrics("decode") - before)
    print(f"   the decode tier's prompt tokens by source: {moved}")
    report.check(
        moved.get("external_kv_transfer") == answer.prompt_tokens and not moved.get("local_compute"),
        f"all {answer.prompt_tokens} prompt tokens' KV cache moved from prefill to decode, none was computed again",
    )
    return len(text.encode()) / answer.prompt_tokens


def _sent(chat: Service, prompt: Prompt) -> Record:
    [record] = Load(chat.target, OpenLoop([Arrival(0, prompt)]), source="demo").run().records
    return record


def run(
    chat: Service, rows: Sequence[trace.Asked], bytes_per_token: float, report: Report
) -> tuple[Seen, dict[str, Any]]:
    """Sends the rows; returns what was seen, and by which roads the prompts came to the decode tier.

    What should hold and does not is in the report's `broken`.
    """
    gateway = Gateway(chat.cluster, stack.SYSTEM)
    before, roads = chat.metrics("decode"), gateway.prefills(chat.key)
    seen = watched(chat, RUN, TARGETS, rows, plan(rows, bytes_per_token, f"{time.time_ns():x}"))
    moved = prompt_sources(chat.metrics("decode") - before)
    roads = gateway.prefills(chat.key) - roads
    print(f"   decode tier's prompt tokens by source: {moved}; prefills: {dict(roads)}")
    failed = [row for row in seen.requests if row.broken or row.refused or row.gone]
    kinds = sorted({f"{row.outcome} {row.status} {row.reason}".strip() for row in failed})
    report.expect(not failed, f"{len(seen.requests)} requests, {len(failed)} failed {kinds or ''}".strip())
    prompts = sum(row.prompt_tokens for row in seen.requests)
    share = moved.get("external_kv_transfer", 0) / max(1, prompts)
    report.expect(share >= MOVED, f"{share:.1%} of the prompt tokens' KV cache moved to the decode tier")
    return seen, {"prompt_tokens_by_source": moved, "prefills": dict(roads)}
