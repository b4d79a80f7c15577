"""A real trace on a real cluster, shown live: `python -m e2e.demo`.

Once on real vLLM engines at a rate that two cores can take, once on a fleet of light engines at an H200's pace, with a
step in each tier's load, cold starts of 30 to 60 s and a kill. Leaves build/demo/report.{json,html}, requests.jsonl and
replicas.jsonl. Ends with 0 only if everything that it shows did happen and the fleet reached what `criteria.py` names.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from e2e.cluster.settings import BIN, KUBECONFIG, ROOT
from e2e.demo import engines, figures, fleet, followers, lines, report, trace
from e2e.demo.criteria import Facts, judge
from e2e.demo.plant import Kind, load_profile
from e2e.demo.stages import Failed, Report
from e2e.demo.watch import Seen
from e2e.lib import stack
from e2e.lib.kube import Cluster, KubectlError
from e2e.lib.report import explain
from e2e.lib.service import START_S, Service
from e2e.lib.wait import until
from plimsoll.cli.page import page, table

NAMESPACE: Final = "demo"
OUT: Final = ROOT / "build" / "demo"
BLOCK_TOKENS: Final = 128  # of prefill and decode tiers
MIDDLE_COLD_S: Final = sum(fleet.COLD_S) / 2
_GATEWAYS: Final = ("--set", "gateway.replicas=1")  # two beside the engines are too many for two cores
_ERRORS: Final = (Failed, AssertionError, KubectlError, httpx.HTTPError)


@dataclass
class Run:
    """One run with its facts; `extra` goes into the report as it is, `parts` are further parts of the page."""

    name: str
    title: str
    seen: Seen
    facts: Facts
    extra: dict[str, Any]
    parts: list[tuple[str, str]]
    bands: tuple[tuple[float, float, str], ...] = ()


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("--only", choices=(engines.RUN, fleet.RUN), help="one of the two runs, and not the other")
    parser.add_argument("--chart", type=Path, default=stack.CHART, help="the chart that is installed")
    parser.add_argument("--as-is", action="store_true", help="neither cluster nor images are brought up to date")
    asked = parser.parse_args(argv)
    told = Report(OUT / "report.json")
    runs: list[Run] = []
    error: str | None = "interrupted"
    try:
        if not asked.as_is:
            _prepare(told)
        with stack.connect() as cluster:
            try:
                _show(cluster, told, runs, asked)
            except _ERRORS:
                print(explain(cluster, [NAMESPACE], stack.SYSTEM))
                raise
        error = "; ".join(told.broken) or None
        if error:
            print(f"\nThe demo did not reach what it should: {error}", file=sys.stderr)
    except (*_ERRORS, subprocess.CalledProcessError) as failure:
        error = str(failure)
        print(f"\nThe demo failed: {error}", file=sys.stderr)
    finally:
        _leave(told, runs, error)
    if error is None:
        print(_goodbye(runs))
    return 0 if error is None else 1


def _prepare(told: Report) -> None:
    with told.stage("a Kubernetes cluster made by kind, with a registry beside it"):
        stack.cluster_verb("up")
    with told.stage("images of operator, Envoy and engines"):
        stack.cluster_verb("images")


def _show(cluster: Cluster, told: Report, runs: list[Run], asked: argparse.Namespace) -> None:
    with told.stage("helm install plimsoll charts/plimsoll"):
        stack.install(cluster, *_GATEWAYS, chart=asked.chart)
        print(cluster.kubectl("get", "pods", "-n", stack.SYSTEM))
    stack.make_namespace(cluster, NAMESPACE)
    light = fleet.renew(cluster, NAMESPACE) if asked.only != engines.RUN else None  # starts while the other one runs
    if asked.only != fleet.RUN:
        runs.append(_real(cluster, told))
    if light:
        runs.append(_light(light, told))


def _real(cluster: Cluster, told: Report) -> Run:
    chat = engines.service(cluster, NAMESPACE)
    with told.stage("kubectl apply -f chat.yaml, until it is Ready"):
        path = OUT / "chat.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(engines.engines_manifest(), sort_keys=False))
        print(path.read_text())
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(path))
        _until_ready(cluster, chat)
        told.check(chat.is_ready(), "Ready, and nothing left to reconcile")
    with told.stage("one question, and the road of its KV cache"):
        bytes_per_token = engines.ask(chat, told)
    rows = trace.engines_load()
    title = f"real vLLM engines: every {trace.ENGINES_KEEP_EVERY}th request, {trace.ENGINES_TIME_SCALE:g} times as fast"
    with told.stage(title):
        seen, extra = engines.run(chat, rows, bytes_per_token, told)
    end_s = max(row.ended_s for row in seen.requests)
    facts = Facts(engines.TARGETS, {"prefill": 1, "decode": 1}, end_s, figures.Span(end_s, end_s), ())
    extra |= {"time_scale": trace.ENGINES_TIME_SCALE, "kept_every": trace.ENGINES_KEEP_EVERY}
    return Run(engines.RUN, title, seen, facts, extra, [])


def _light(light: Service, told: Report) -> Run:
    with told.stage("the fleet of light engines, made anew, until it is Ready"):
        light.wait_ready(START_S)
        path = OUT / "fleet.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(fleet.fleet_manifest(), sort_keys=False))
        print(path.read_text())
    rows = trace.fleet_load()
    title = f"light engines at an H200's pace: {len(rows)} requests in {trace.LENGTH_S:.0f} s, time scale 1"
    with told.stage(title):
        seen, kill = fleet.run(light, rows)
    constant = figures.Span(trace.REAL_S, trace.LENGTH_S)
    most = {tier: high for tier, (_, high) in fleet.BOUNDS.items()}
    kills = (kill.span,) if kill else ()
    facts = Facts(fleet.TARGETS, most, trace.LENGTH_S, constant, kills)
    with told.stage("the same arrivals, with policies that follow the load"):
        pairs = _followers(seen, facts, kill)
    return _judged(title, seen, facts, pairs, told)


def _followers(seen: Seen, facts: Facts, kill: fleet.Kill | None) -> list[followers.Pair]:
    extra_s = max(0.0, statistics.median(seen.starts.values()) - MIDDLE_COLD_S) if seen.starts else 0.0
    profile = load_profile(fleet.PROFILE)
    start_s = (fleet.COLD_S[0] + extra_s, fleet.COLD_S[1] + extra_s)
    factors = {"prefill": profile.producer_factor, "decode": profile.consumer_factor}
    kinds = {tier: Kind(profile, factor, fleet.SLOTS, BLOCK_TOKENS, start_s) for tier, factor in factors.items()}
    bounds = {tier: followers.Bounds(*both) for tier, both in fleet.BOUNDS.items()}
    scene = followers.Scene(
        kinds, bounds, facts.end_s, kill.tier if kill else None, kill.span.begin_s if kill else facts.end_s
    )
    gated = bool(seen.status.get("admission"))
    found = followers.all_pairs(seen.requests, scene, facts.targets, gated)
    how = "with admission" if gated else "without admission"
    print(f"   {len(found)} pairs of followers {how}, start-up {start_s[0]:.0f} to {start_s[1]:.0f} s")
    return found


def _judged(title: str, seen: Seen, facts: Facts, pairs: list[followers.Pair], told: Report) -> Run:
    paid = sum(figures.replica_seconds(seen.replicas, facts.end_s).values())
    best, front = followers.best_at(pairs, paid), followers.frontier(pairs)
    found = judge(seen.requests, seen.replicas, facts, best)
    print(f"   {paid:.0f} replica-seconds")
    for one in found:
        told.expect(one.holds, f"{one.name}: {one.found}")
    extra = {
        "time_scale": 1.0,
        "starts_s": seen.starts,
        "followers": [asdict(pair) for pair in front],
        "best_follower": asdict(best) if best else None,
        "criteria": [asdict(one) for one in found],
    }
    parts = [
        ("What had to be reached", report.verdicts(found)),
        ("The best that followers make of the same arrivals", report.follower_table(front)),
    ]
    bands = (
        (*trace.STEP, "more code"),
        (*trace.WAVE, "more chat"),
        (trace.REAL_S, trace.LENGTH_S, "constant"),
    )
    return Run(fleet.RUN, title, seen, facts, extra, parts, bands)


def _leave(told: Report, runs: list[Run], error: str | None) -> None:
    """Writes the four files of whatever was run."""
    requests = [row for run in runs for row in run.seen.requests]
    replicas = [row for run in runs for row in run.seen.replicas]
    lines.write(OUT / "requests.jsonl", requests)
    lines.write(OUT / "replicas.jsonl", replicas)
    told.findings["runs"] = {run.name: _run_json(run) for run in runs}
    told.findings["credit"] = trace.CREDIT
    told.write(error)
    parts = [part for run in reversed(runs) for part in _run_html(run)]
    stages = table(["stage", "s"], told.stages.items())
    whole = page("Plimsoll: the demo", [*parts, ("Stages", stages), ("Credit", f"<p>{trace.CREDIT}</p>")])
    (OUT / "report.html").write_text(whole)


def _run_json(run: Run) -> dict[str, Any]:
    seen = run.seen
    return {
        "title": run.title,
        "facts": report.facts_json(run.facts),
        "figures": report.summary(seen.requests, seen.replicas, run.facts),
        **run.extra,
        "decisions": [asdict(one) for one in seen.decisions],
        "events": [asdict(one) for one in seen.events],
        "client_cpu_s": seen.client_cpu_s,
    }


def _run_html(run: Run) -> list[tuple[str, str]]:
    seen, facts = run.seen, run.facts
    return [
        (run.title[0].upper() + run.title[1:], report.pictures(seen.requests, seen.replicas, facts, run.bands)),
        *run.parts,
        ("Figures", report.figures_table(report.summary(seen.requests, seen.replicas, facts))),
        ("Decisions", report.told_table(seen.decisions)),
        ("Events", report.told_table(seen.events)),
    ]


def _until_ready(cluster: Cluster, service: Service) -> None:
    """Shows `kubectl get plim` whenever it changed."""
    shown = ""

    def look() -> bool:
        nonlocal shown
        ready = service.is_ready()
        table = cluster.kubectl("get", "plim", service.name, "-n", NAMESPACE)
        without_age = "\n".join(line.rsplit(maxsplit=1)[0] for line in table.splitlines())
        if without_age != shown:
            print("\n".join(table.splitlines()[1 if shown else 0 :]), flush=True)
            shown = without_age
        return ready

    until("the service is Ready", look, START_S, every_s=1)


def _goodbye(runs: list[Run]) -> str:
    where = Path(KUBECONFIG).relative_to(ROOT)
    name = engines.NAME if runs[-1].name == engines.RUN else fleet.RUN
    return f"""
All of it happened. build/demo/report.html shows it; report.json has the figures, requests.jsonl a line for each request
and replicas.jsonl one for each look at a tier: all figures follow from these.

Look around:
  export KUBECONFIG=$PWD/{where} PATH={BIN}:$PATH
  kubectl get plim,pods -n {NAMESPACE}
  kubectl describe plim {name} -n {NAMESPACE}
  curl {stack.GATEWAY_URL}/v1/models
  curl {stack.GATEWAY_URL}/v1/chat/completions -H 'content-type: application/json' -d \\
    '{{"model": "{name}", "max_tokens": 16, "messages": [{{"role": "user", "content": "Hi"}}]}}'
  kubectl delete plim --all -n {NAMESPACE}

Remove all of it: make demo-down"""


if __name__ == "__main__":
    sys.exit(main())
