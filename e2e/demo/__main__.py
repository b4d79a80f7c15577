"""From nothing to a served model, shown step by step: `python -m e2e.demo`.

Ends with 0 only if everything it shows did happen; build/demo/report.json has the figures. Running it again is quick:
each stage finds what is there already, and the service is only made anew if it is not as the manifest says.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import yaml

from e2e.cluster.settings import BIN, KUBECONFIG, ROOT
from e2e.demo import trace
from e2e.demo.stages import Failed, Report
from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, KubectlError, Object
from e2e.lib.ledger import Ledger
from e2e.lib.load import Arrival, Load, OpenLoop, unique_text
from e2e.lib.metrics import Gateway, prompt_sources
from e2e.lib.report import explain
from e2e.lib.service import MODEL_URI, Service
from e2e.lib.wait import until

NAMESPACE = "demo"
MANIFEST = ROOT / "crds" / "examples" / "prefill-decode.yaml"
OUT = ROOT / "build" / "demo"
START_S = 300.0
CALIBRATION_WORDS = 200


def main() -> int:
    """The exit status."""
    report = Report(OUT / "report.json")
    error: str | None = "interrupted"
    try:
        _prepare(report)
        with stack.connect() as cluster:
            try:
                _show(cluster, report)
            except (Failed, AssertionError, KubectlError):
                print(explain(cluster, [NAMESPACE], stack.SYSTEM))
                raise
        error = None
    except (Failed, AssertionError, KubectlError, subprocess.CalledProcessError) as failure:
        error = str(failure)
        print(f"\nThe demo failed: {error}", file=sys.stderr)
    finally:
        report.write(error)
    if error is None:
        print(_goodbye(report))
    return 0 if error is None else 1


def _prepare(report: Report) -> None:
    with report.stage("a Kubernetes cluster made by kind, with a registry beside it"):
        stack.cluster_verb("up")
    with report.stage("images of operator, Envoy and engine"):
        stack.cluster_verb("images")


def _show(cluster: Cluster, report: Report) -> None:
    with report.stage("helm install plimsoll charts/plimsoll"):
        stack.install(cluster)
        print(cluster.kubectl("get", "pods", "-n", stack.SYSTEM))
    with report.stage("the node's GPUs"):
        _show_gpus(cluster, report)
    service = Service(cluster, NAMESPACE, "chat", stack.GATEWAY_URL)
    with report.stage("kubectl apply -f chat.yaml, until it is Ready"):
        _apply(cluster, service, report)
    with report.stage("one question"):
        tokens_per_word = _ask(service, report)
    with report.stage("a real trace, open loop"):
        _load(cluster, service, tokens_per_word, report)
    with report.stage("what the service says about itself"):
        print(cluster.kubectl("describe", "plim", service.name, "-n", NAMESPACE))


def _show_gpus(cluster: Cluster, report: Report) -> None:
    """Made up by a patch of the node's status, so that manifests written for GPU nodes schedule here."""
    gpus = {n["metadata"]["name"]: n["status"]["allocatable"].get("nvidia.com/gpu", "0") for n in cluster.list("nodes")}
    report.check(any(int(n) > 1 for n in gpus.values()), f"nodes advertise nvidia.com/gpu: {gpus}")


def _manifest() -> Object:
    """The README's manifest but for the URI (no model can be downloaded here, a tiny one is in the engine image), and
    for what two cores can promise and carry: one engine a tier."""
    manifest: Object = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["model"]["uri"] = MODEL_URI
    manifest["spec"]["slo"] = {"ttft": "5s", "tpot": "300ms"}
    for tier in manifest["spec"]["tiers"].values():
        tier["maxReplicas"] = tier["minReplicas"]
    return manifest


def _apply(cluster: Cluster, service: Service, report: Report) -> None:
    stack.make_namespace(cluster, NAMESPACE)
    path = OUT / "chat.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(_manifest(), sort_keys=False))
    print(path.read_text())
    start = time.monotonic()
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(path))
    until("every tier has its Deployment", lambda: len(cluster.list("deployments", NAMESPACE)) == 2, 60, every_s=0.1)
    report.findings["manifest_to_objects_s"] = round(time.monotonic() - start, 2)
    until("the service is Ready", _Watch(cluster, service).look, START_S, every_s=1)
    report.findings["manifest_to_ready_s"] = round(time.monotonic() - start, 1)
    report.check(service.is_ready(), "Ready, and nothing left to reconcile")


class _Watch:
    """`kubectl get plim`, printed whenever it changed."""

    def __init__(self, cluster: Cluster, service: Service) -> None:
        self._cluster, self._service, self._shown = cluster, service, ""

    def look(self) -> bool:
        ready = self._service.is_ready()
        table = self._cluster.kubectl("get", "plim", "-n", NAMESPACE)
        without_age = "\n".join(line.rsplit(maxsplit=1)[0] for line in table.splitlines())
        if without_age != self._shown:
            lines = table.splitlines()
            print("\n".join(lines if not self._shown else lines[1:]), flush=True)
            self._shown = without_age
        return ready


def _ask(service: Service, report: Report) -> float:
    """Asks once, shows the stream's text, and returns the tokenizer's tokens a word."""
    question = Prompt(unique_text(CALIBRATION_WORDS, f"ask {time.time_ns()}"), max_tokens=24)
    [answer] = _sent(service, [Arrival(0, question)]).records
    report.check(answer.ok, f"a streamed answer of {answer.output_tokens} tokens in {answer.events} events")
    print(f"   {answer.text!r} (a random model: the words mean nothing)")
    return answer.prompt_tokens / CALIBRATION_WORDS


def _sent(service: Service, arrivals: list[Arrival]) -> Ledger:
    return Load(service.target, OpenLoop(arrivals), source="demo").run()


def _load(cluster: Cluster, service: Service, tokens_per_word: float, report: Report) -> None:
    rows = trace.thin(trace.read())
    gateway = Gateway(cluster, stack.SYSTEM)
    print(f"   {len(rows)} requests of {trace.TRACE.name} in {rows[-1].arrival_s:.0f} s, at their own moments")
    before, roads = service.metrics("decode"), gateway.prefills(service.key)
    ledger = Load(service.target, trace.plan(rows, tokens_per_word, str(time.time_ns())), source="demo").run()
    moved = prompt_sources(service.metrics("decode") - before)
    roads = gateway.prefills(service.key) - roads
    print(f"   {ledger.summary()}\n   decode tier's prompt tokens by source: {moved}; prefills: {dict(roads)}")
    (OUT / "ledger.jsonl").write_text(ledger.dump())
    report.findings |= {"ledger": ledger.totals(), "prompt_tokens_by_source": moved, "prefills": dict(roads)}
    report.check(
        not ledger.failures, f"no request failed\n{ledger.explain()}" if ledger.failures else "no request failed"
    )
    report.check(
        moved.get("external_kv_transfer") == ledger.prompt_tokens,
        "every prompt token's KV cache moved to the decode tier",
    )
    report.check(moved.get("local_compute", 0) == 0, "the decode tier computed no prompt token")


def _goodbye(report: Report) -> str:
    where = Path(KUBECONFIG).relative_to(ROOT)
    return f"""
All of it happened. Figures: build/demo/report.json, one line a request: build/demo/ledger.jsonl

Look around:
  export KUBECONFIG=$PWD/{where} PATH={BIN}:$PATH
  kubectl get plim,pods -n {NAMESPACE}
  kubectl describe plim chat -n {NAMESPACE}
  curl {stack.GATEWAY_URL}/v1/models
  curl {stack.GATEWAY_URL}/v1/chat/completions -H 'content-type: application/json' -d \\
    '{{"model": "chat", "max_tokens": 16, "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
  kubectl delete plim chat -n {NAMESPACE}

Remove all of it: make demo-down"""


if __name__ == "__main__":
    sys.exit(main())
