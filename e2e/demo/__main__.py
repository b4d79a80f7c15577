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
from e2e.demo import engines, figures, fleet, reactive_baseline, records, report, trace
from e2e.demo.criteria import Facts, assess
from e2e.demo.observer import RunObservations
from e2e.demo.plant import ReplicaKind, load_profile
from e2e.demo.stages import DemoFailed, StageReport
from e2e.lib import stack
from e2e.lib.failure_report import describe
from e2e.lib.kube import Cluster, KubectlError
from e2e.lib.service import START_S, Service
from e2e.lib.wait import wait_until
from plimsoll.cli.html_report import render_page, render_table

NAMESPACE: Final = "demo"
OUT: Final = ROOT / "build" / "demo"
BLOCK_TOKENS: Final = 128  # of prefill and decode tiers
MEAN_COLD_START_S: Final = sum(fleet.COLD_S) / 2
_ERRORS: Final = (DemoFailed, AssertionError, KubectlError, httpx.HTTPError)


@dataclass
class DemoRun:
    """One run with its facts; `extra` goes into the report as it is, `parts` are further parts of the page."""

    name: str
    title: str
    observations: RunObservations
    facts: Facts
    extra: dict[str, Any]
    parts: list[tuple[str, str]]
    bands: tuple[tuple[float, float, str], ...] = ()


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument(
        "--only", choices=(engines.ENGINES_RUN, fleet.FLEET_RUN), help="one of the two runs, and not the other"
    )
    parser.add_argument("--chart", type=Path, default=stack.CHART, help="the chart that is installed")
    parser.add_argument("--as-is", action="store_true", help="neither cluster nor images are brought up to date")
    arguments = parser.parse_args(argv)
    report = StageReport(OUT / "report.json")
    runs: list[DemoRun] = []
    error: str | None = "interrupted"
    try:
        if not arguments.as_is:
            _prepare(report)
        with stack.connect_cluster() as cluster:
            try:
                _show(cluster, report, runs, arguments)
            except _ERRORS:
                print(describe(cluster, [NAMESPACE], stack.SYSTEM))
                raise
        error = "; ".join(report.failures) or None
        if error:
            print(f"\nThe demo did not reach what it should: {error}", file=sys.stderr)
    except (*_ERRORS, subprocess.CalledProcessError) as failure:
        error = str(failure)
        print(f"\nThe demo failed: {error}", file=sys.stderr)
    finally:
        _write_outputs(report, runs, error)
    if error is None:
        print(_print_paths(runs))
    return 0 if error is None else 1


def _prepare(report: StageReport) -> None:
    with report.stage("a Kubernetes cluster made by kind, with a registry beside it"):
        stack.cluster_verb("up")
    with report.stage("images of operator, Envoy and engines"):
        stack.cluster_verb("images")


def _show(cluster: Cluster, report: StageReport, runs: list[DemoRun], arguments: argparse.Namespace) -> None:
    with report.stage("helm install plimsoll charts/plimsoll"):
        stack.install(cluster, chart=arguments.chart)
        print(cluster.kubectl("get", "pods", "-n", stack.SYSTEM))
    stack.make_namespace(cluster, NAMESPACE)
    light = (
        fleet.recreate(cluster, NAMESPACE) if arguments.only != engines.ENGINES_RUN else None
    )  # starts while the other one runs
    if arguments.only != fleet.FLEET_RUN:
        runs.append(_run_engines(cluster, report))
    if light:
        runs.append(_run_fleet(light, report))


def _run_engines(cluster: Cluster, report: StageReport) -> DemoRun:
    chat = engines.service(cluster, NAMESPACE)
    with report.stage("kubectl apply -f chat.yaml, until it is Ready"):
        path = OUT / "chat.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(engines.engines_manifest(), sort_keys=False))
        print(path.read_text())
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(path))
        _until_ready(cluster, chat)
        report.check(chat.is_ready(), "Ready, and nothing left to reconcile")
    with report.stage("one question, and the road of its KV cache"):
        bytes_per_token = engines.check_transfer(chat, report)
    with report.stage("a tool call and structured output"):
        engines.check_tools(chat, report)
    rows = trace.engines_load()
    title = (
        f"real vLLM engines: every {trace.ENGINES_SAMPLE_EVERY}th request, {trace.ENGINES_TIME_SCALE:g} times as fast"
    )
    with report.stage(title):
        observations, extra = engines.run(chat, rows, bytes_per_token, report)
    end_s = max(row.ended_s for row in observations.requests)
    facts = Facts(engines.TARGETS, {"prefill": 1, "decode": 1}, end_s, figures.TimeSpan(end_s, end_s), ())
    extra |= {"time_scale": trace.ENGINES_TIME_SCALE, "kept_every": trace.ENGINES_SAMPLE_EVERY}
    return DemoRun(engines.ENGINES_RUN, title, observations, facts, extra, [])


def _run_fleet(fleet_run: Service, report: StageReport) -> DemoRun:
    with report.stage("the fleet of light engines, made anew, until it is Ready"):
        fleet_run.wait_ready(START_S)
        path = OUT / "fleet.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(fleet.fleet_manifest(), sort_keys=False))
        print(path.read_text())
    rows = trace.fleet_load()
    title = f"light engines at an H200's pace: {len(rows)} requests in {trace.LENGTH_S:.0f} s, time scale 1"
    with report.stage(title):
        observations, kill = fleet.run(fleet_run, rows)
    constant = figures.TimeSpan(trace.REAL_ARRIVALS_S, trace.LENGTH_S)
    max_replicas = {tier: high for tier, (_, high) in fleet.BOUNDS.items()}
    kills = (kill.span,) if kill else ()
    facts = Facts(fleet.TARGETS, max_replicas, trace.LENGTH_S, constant, kills)
    with report.stage("the same arrivals, with policies that follow the load"):
        pairs = _compare_followers(observations, facts, kill)
    return _assess(title, observations, facts, pairs, report)


def _compare_followers(
    observations: RunObservations, facts: Facts, kill: fleet.Kill | None
) -> list[reactive_baseline.Pair]:
    extra_s = (
        max(0.0, statistics.median(observations.startup_s.values()) - MEAN_COLD_START_S)
        if observations.startup_s
        else 0.0
    )
    profile = load_profile(fleet.PROFILE)
    start_s = (fleet.COLD_S[0] + extra_s, fleet.COLD_S[1] + extra_s)
    factors = {"prefill": profile.producer_factor, "decode": profile.consumer_factor}
    kinds = {tier: ReplicaKind(profile, factor, fleet.SLOTS, BLOCK_TOKENS, start_s) for tier, factor in factors.items()}
    bounds = {tier: reactive_baseline.ReplicaBounds(*both) for tier, both in fleet.BOUNDS.items()}
    scene = reactive_baseline.BaselineContext(
        kinds, bounds, facts.end_s, kill.tier if kill else None, kill.span.begin_s if kill else facts.end_s
    )
    with_caps = bool(observations.limits)
    found = reactive_baseline.all_pairs(observations.requests, scene, facts.targets, with_caps)
    settings_label = "with admission" if with_caps else "without admission"
    print(f"   {len(found)} pairs of followers {settings_label}, start-up {start_s[0]:.0f} to {start_s[1]:.0f} s")
    return found


def _assess(
    title: str,
    observations: RunObservations,
    facts: Facts,
    pairs: list[reactive_baseline.Pair],
    stage: StageReport,
) -> DemoRun:
    paid = sum(figures.replica_seconds(observations.replicas, facts.end_s).values())
    best, pareto = reactive_baseline.best_within_cost(pairs, paid), reactive_baseline.pareto_front(pairs)
    criteria_results = assess(observations.requests, observations.replicas, facts, best)
    print(f"   {paid:.0f} replica-seconds")
    for item in criteria_results:
        stage.check_later(item.holds, f"{item.name}: {item.found}")
    extra = {
        "time_scale": 1.0,
        "starts_s": observations.startup_s,
        "followers": [asdict(pair) for pair in pareto],
        "best_follower": asdict(best) if best else None,
        "criteria": [asdict(item) for item in criteria_results],
    }
    parts = [
        ("What had to be reached", report.criteria_table(criteria_results)),
        ("The best that followers make of the same arrivals", report.follower_table(pareto)),
    ]
    bands = (
        (*trace.STEP, "more code"),
        (*trace.WAVE, "more chat"),
        (trace.REAL_ARRIVALS_S, trace.LENGTH_S, "constant"),
    )
    return DemoRun(fleet.FLEET_RUN, title, observations, facts, extra, parts, bands)


def _write_outputs(report: StageReport, runs: list[DemoRun], error: str | None) -> None:
    """Writes the four files of whatever was run."""
    requests = [row for run in runs for row in run.observations.requests]
    replicas = [row for run in runs for row in run.observations.replicas]
    records.write(OUT / "requests.jsonl", requests)
    records.write(OUT / "replicas.jsonl", replicas)
    report.findings["runs"] = {run.name: _run_json(run) for run in runs}
    report.findings["credit"] = trace.CREDIT
    report.write(error)
    parts = [part for run in reversed(runs) for part in _run_html(run)]
    stages = render_table(["stage", "s"], report.stages.items())
    page_text = render_page("Plimsoll: the demo", [*parts, ("Stages", stages), ("Credit", f"<p>{trace.CREDIT}</p>")])
    (OUT / "report.html").write_text(page_text)


def _run_json(run: DemoRun) -> dict[str, Any]:
    observations = run.observations
    return {
        "title": run.title,
        "facts": report.facts_json(run.facts),
        "figures": report.summary(observations.requests, observations.replicas, run.facts),
        **run.extra,
        "decisions": [asdict(item) for item in observations.decisions],
        "events": [asdict(item) for item in observations.events],
        "client_cpu_s": observations.client_cpu_s,
    }


def _run_html(run: DemoRun) -> list[tuple[str, str]]:
    observations, facts = run.observations, run.facts
    return [
        (
            run.title[0].upper() + run.title[1:],
            report.charts(observations.requests, observations.replicas, facts, run.bands),
        ),
        *run.parts,
        ("Figures", report.figures_table(report.summary(observations.requests, observations.replicas, facts))),
        ("Decisions", report.messages_table(observations.decisions)),
        ("Events", report.messages_table(observations.events)),
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

    wait_until("the service is Ready", look, START_S, every_s=1)


def _print_paths(runs: list[DemoRun]) -> str:
    where = Path(KUBECONFIG).relative_to(ROOT)
    name = engines.NAME if runs[-1].name == engines.ENGINES_RUN else fleet.FLEET_RUN
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
