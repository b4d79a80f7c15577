"""Looks at a service under load: its replicas each second, a line for people every five, Events as they come.

Problem: what the report says of replicas and decisions must have been seen, not inferred, and looking must cost little.
Idea: one thread, one object and one list of pods a second over the open connection; the operator's own gauges and the
Events only with the line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from e2e.demo.figures import Targets, WindowFigures, window_figures
from e2e.demo.records import ReplicaSample, RequestLine, request_line
from e2e.demo.trace import TraceRequest
from e2e.lib import stack
from e2e.lib.background import BackgroundThread
from e2e.lib.kube import Cluster, Object, condition, is_true
from e2e.lib.load import Load, OpenLoop
from e2e.lib.metrics import Samples
from e2e.lib.request_log import RequestLog
from e2e.lib.service import Service
from plimsoll.api import labels

POLL_S: Final = 1.0
PRINT_EVERY_POLLS: Final = 5
FINAL_POLL_MARGIN_S: Final = 0.5  # after the last arrival's moment it has been sent
WINDOW_S: Final = 30.0
METRICS_PORT: Final = 8081
_TERMINAL_PHASES: Final = ("Succeeded", "Failed")
_DECISIONS: Final = ("ScaledUp", "ScaledDown", "ScaledToZero", "ScaledFromZero")  # reasons of Events


@dataclass(frozen=True, slots=True)
class OperatorMessage:
    """Something the operator said: an Event or a decision, seconds after the run's start."""

    t_s: float
    what: str
    words: str


@dataclass(frozen=True)
class RunObservations:
    """What a run left.

    `startup_s`: seconds from order to ready of the pods that came; `limits`: the published admission limits;
    `client_cpu_s`: the demo's own.
    """

    requests: list[RequestLine]
    replicas: list[ReplicaSample]
    events: list[OperatorMessage]
    decisions: list[OperatorMessage]
    startup_s: dict[str, float]
    status: dict[str, Any]
    limits: dict[str, Any]
    client_cpu_s: float


def observe_load(
    service: Service,
    run: str,
    targets: Targets,
    rows: Sequence[TraceRequest],
    load: OpenLoop,
    meanwhile: Callable[[ServiceObserver], None] = lambda _: None,
) -> RunObservations:
    """Sends a load to a service and shows it live until the last request has ended; `meanwhile` runs beside it."""
    cpu = time.process_time()
    observer = ServiceObserver(service, run, targets, stack.SYSTEM, (row.at_s for row in rows), _print)
    with observer as watch, Load(service.target, load, source=run) as sending:
        watch.attach_log(sending.ledger)
        meanwhile(watch)
        time.sleep(max(0.0, watch.origin + rows[-1].at_s + FINAL_POLL_MARGIN_S - time.time()))
    requests = sorted((request_line(r, run, watch.origin) for r in sending.ledger.records), key=lambda one: one.sent_s)
    return RunObservations(
        requests,
        watch.replicas,
        watch.events,
        watch.decisions,
        watch.starts,
        service.status(),
        service.limits(),
        round(time.process_time() - cpu, 1),
    )


def _print(words: str) -> None:
    print(words, flush=True)


class ServiceObserver(BackgroundThread):
    """Watches one service from `with` to its end. `arrivals_s`: planned arrivals, in seconds after its start."""

    def __init__(
        self,
        service: Service,
        run: str,
        targets: Targets,
        system: str,
        arrivals_s: Iterable[float],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(self._poll_loop, 30, "watch")
        self.replicas: list[ReplicaSample] = []
        self.events: list[OperatorMessage] = []
        self.decisions: list[OperatorMessage] = []
        self.starts: dict[str, float] = {}  # pods ordered during the run: seconds from the order to ready
        self.origin = time.time()
        self._service, self._run, self._targets, self._system = service, run, targets, system
        self._arrivals_s = sorted(arrivals_s)
        self._say = say
        self._ledger = RequestLog()
        self._recorded_events: set[str] = {_event_key(event) for event in service.events()}

    def __enter__(self) -> Self:
        self.origin = time.time()
        return super().__enter__()

    def attach_log(self, ledger: RequestLog) -> None:
        """Takes latencies and refusals from this ledger from now on."""
        self._ledger = ledger

    def record_message(self, what: str, words: str) -> float:
        """Something the demo itself does; returns its time."""
        at = time.time() - self.origin
        self._record(self.events, OperatorMessage(round(at, 1), what, words))
        return at

    def _poll_loop(self) -> None:
        looks = 0
        while not self._stop.wait(max(0.0, self.origin + looks * POLL_S - time.time())):
            looks = max(looks, int(time.time() - self.origin)) + 1
            try:
                self._poll(looks % PRINT_EVERY_POLLS == 1)
            except Exception as error:  # noqa: BLE001  # a busy API server: the next look is a second away
                self._say(f"   (not seen: {type(error).__name__} {error})")

    def _poll(self, print_status: bool) -> None:
        service = self._service
        now, obj, pods = time.time() - self.origin, service.get() or {}, service.pods()
        status = obj.get("status") or {}
        samples = [
            count_pods(self._run, now, tier, desired_replicas, pods)
            for tier, desired_replicas in (status.get("tiers") or {}).items()
        ]
        self.replicas += samples
        self._record_startups(pods)
        if print_status:
            self._record_events()
            self._say(self._status_line(now, samples))

    def _record_startups(self, pods: Iterable[Object]) -> None:
        for pod in pods:
            name, created = pod["metadata"]["name"], _to_unix(pod["metadata"]["creationTimestamp"])
            if name not in self.starts and created >= self.origin and is_true(pod, "Ready"):
                self.starts[name] = round(_to_unix(condition(pod, "Ready")["lastTransitionTime"]) - created, 1)

    def _record_events(self) -> None:
        for event in sorted(self._service.events(), key=_event_time):
            key = _event_key(event)
            if key not in self._recorded_events:
                self._recorded_events.add(key)
                at = max(0.0, _to_unix(_event_time(event)) - self.origin)
                self._record(self.events, OperatorMessage(round(at, 1), event["reason"], event["message"]))
                if event["reason"] in _DECISIONS and _to_unix(_event_time(event)) >= self.origin:
                    self.decisions.append(OperatorMessage(round(at, 1), "decision", event["message"]))

    def _record(self, messages: list[OperatorMessage], message: OperatorMessage) -> None:
        messages.append(message)
        self._say(f"   {message.t_s:5.0f} s  * {message.what}: {message.words}")

    def _status_line(self, now: float, samples: Iterable[ReplicaSample]) -> str:
        load = tier_utilization(self._service.cluster, self._system, self._service.key)
        recent = self._ended_since(time.time() - WINDOW_S)
        offered_rate = sum(now - PRINT_EVERY_POLLS * POLL_S <= at < now for at in self._arrivals_s) / (
            PRINT_EVERY_POLLS * POLL_S
        )
        tiers = "  ".join(
            f"{sample.tier} {sample.ready}/{sample.desired} {_percent(load.get(sample.tier))}" for sample in samples
        )
        return f"   {now:5.0f} s  {offered_rate:5.1f} req/s  {tiers}  {_latencies(recent, self._targets)}"

    def _ended_since(self, unix_s: float) -> list[RequestLine]:
        return [request_line(r, self._run, self.origin) for r in self._ledger.records if r.ended_at >= unix_s]


def count_pods(run: str, now: float, tier: str, desired_replicas: Object, pods: Iterable[Object]) -> ReplicaSample:
    """A tier's pods by what they do; ordered ones that are not there yet count as starting."""
    tier_pods = [pod for pod in pods if pod["metadata"].get("labels", {}).get(labels.ROLE) == tier]
    running_pods = [pod for pod in tier_pods if pod.get("status", {}).get("phase") not in _TERMINAL_PHASES]
    not_terminating = [pod for pod in running_pods if "deletionTimestamp" not in pod["metadata"]]
    ready = sum(is_true(pod, "Ready") for pod in not_terminating)
    desired = int(desired_replicas.get("summary", "0/0").partition("/")[2])
    starting = max(desired, len(not_terminating)) - ready
    return ReplicaSample(run, round(now, 2), tier, desired, ready, starting, len(running_pods) - len(not_terminating))


def tier_utilization(cluster: Cluster, system: str, service: str) -> dict[str, float]:
    """Load over load line by tier, as the leading operator has it; empty while it cannot be asked."""
    by_tier: dict[str, float] = {}
    for pod in cluster.list("pods", system, "app.kubernetes.io/component=operator"):
        if is_true(pod, "Ready"):
            page = cluster.in_pod(system, pod["metadata"]["name"], METRICS_PORT, "/metrics")
            by_tier |= _read_gauges(page, service)
    return by_tier


def _read_gauges(page: str, service: str) -> dict[str, float]:
    name = "plimsoll_autoscaler_utilization_ratio"
    lines = "".join(line + "\n" for line in page.splitlines() if line.startswith(name) and f'"{service}"' in line)
    return Samples.parse(lines).by(name, "tier")


def _latencies(recent: list[RequestLine], targets: Targets) -> str:
    if not recent:
        return "nothing ended yet"
    at: WindowFigures = window_figures(recent, targets, max(r.sent_s for r in recent) + 1e-6, 1e9)
    first = "-" if at.ttft_s is None else f"{at.ttft_s:.2f} s"
    token = "-" if at.tpot_s is None else f"{1000 * at.tpot_s:.0f} ms"
    return f"p{targets.percentile} TTFT {first}, TPOT {token}; shed {at.shed_share:.1%}, missed {at.missed_share:.1%}"


def _percent(share: float | None) -> str:
    return "  - " if share is None else f"{share:4.0%}"


def _event_time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _event_key(event: Object) -> str:
    series: dict[str, Any] = event.get("series") or {}
    return f"{event['metadata']['uid']} {event.get('count') or series.get('count')}"


def _to_unix(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
