"""One scenario: its service, its load, what is done to engines meanwhile, and a file with all that was seen.

Problem: time on the machine with the GPUs is short, and what was not written down there is lost.
Idea: each scenario is bounded in time, ends by itself and leaves two files: NAME.json.gz with every request, every
second of replicas, every Event and scrape, and NAME.logs.tar.zst.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.hardware import client, traces
from e2e.gpu import adapters, caches, load_tools, rival, scenarios
from e2e.gpu.bringup import gpu_product
from e2e.gpu.follower import Follower
from e2e.gpu.observer import Observer, engine_pods, fetch_from_engine, final_state, is_ready, pack_logs
from e2e.gpu.processes import StepFailed, get, kubectl, wait_for
from e2e.gpu.scenarios import PLIMSOLL, SERVICE, Act, Beside, Scenario
from e2e.gpu.settings import CACHES, GATEWAY_URL, NAMESPACE, ROOT, SYSTEM

READY_S: Final = 220.0
FILL_S: Final = 60.0  # at most, for the caches, once everything else is ready
ZERO_S: Final = 240.0
DELETE_S: Final = 90.0
HELD_S: Final = 130.0
_DRAIN_S: Final = 40.0  # after the last request was sent
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_CPU_TIMES: Final = Path("/proc/stat")
_CORE_MARKS: Final = ("EngineCore", "simulated serve")


def run(name: str, out: Path, capacity_per_s: float, *, simulated: bool, workers: int, shorten: float = 1.0) -> None:
    """Raises KeyError for an unknown scenario; what was seen is written whatever happens."""
    scenario = scenarios.SCENARIOS[name]
    if shorten != 1.0:
        scenario = shortened(scenario, shorten)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"scenario": name, "capacity_per_s": capacity_per_s, "began": time.time()}
    result["shorten"] = shorten
    with Observer() as observer:
        try:
            _carry_out(scenario, capacity_per_s, simulated, workers, observer, result)
        except (StepFailed, ValueError, LookupError, OSError) as error:
            result["error"] = str(error)
            observer.mark("failed", error=str(error)[-500:])
        result["final"] = final_state()
    result |= {"samples": observer.samples, "marks": observer.marks}
    pack_logs(out / f"{name}.logs.tar.zst")
    written = out / f"{name}.new"
    with gzip.open(written, "wt") as file:
        json.dump(result, file)
    written.rename(out / f"{name}.json.gz")  # last and at once: who finds it has all of the scenario
    print(json.dumps({"scenario": name, "error": result.get("error"), "figures": result.get("figures")}), flush=True)


def collect(out: Path) -> None:
    """State and logs without a scenario, such as after a step that failed."""
    out.mkdir(parents=True, exist_ok=True)
    with gzip.open(out / "state.json.gz", "wt") as file:
        json.dump(final_state(), file)
    pack_logs(out / "state.logs.tar.zst")


def shortened(scenario: Scenario, factor: float) -> Scenario:
    """The same with less time between its events."""
    phases = tuple((share, seconds * factor) for share, seconds in scenario.phases)
    acts = tuple(Act(act.at_s * factor, act.what) for act in scenario.acts)
    beside = scenario.beside and dataclasses.replace(scenario.beside, begin_s=scenario.beside.begin_s * factor)
    return dataclasses.replace(scenario, phases=phases, acts=acts, beside=beside)


def _carry_out(
    scenario: Scenario, capacity: float, simulated: bool, workers: int, observer: Observer, result: dict[str, Any]
) -> None:
    caches.make_folder()
    caches.finish(FILL_S)
    _apply_services(scenario, observer, result)
    if not scenario.to_zero:
        _wait_ready(max(scenario.low, 1) * len(scenario.tiers), observer)
        result["first_answer_s"] = _first_answer(observer, HELD_S)
    if scenario.phases:
        _load_and_follow(scenario, capacity, workers, observer, result)
    if scenario.tools and not simulated:
        result["tools"] = load_tools.run_all(scenario.phases[0][0] * capacity, observer)
    if scenario.to_zero:
        _to_zero_and_back(observer, result)
    if scenario.starts:
        _start_again(scenario.starts, observer, result)


def _apply_services(scenario: Scenario, observer: Observer, result: dict[str, Any]) -> None:
    """The service of the scenario, with engines of the scenario before where they are alike. Raises StepFailed."""
    result["manifest"] = scenarios.manifest(scenario, product=gpu_product())
    result["policy"] = scenario.policy
    found = get(f"inferenceservices/{SERVICE}", "-n", NAMESPACE)
    if found and not _is_alike(found["spec"], result["manifest"]["spec"]):
        _delete_services(observer)  # a service keeps its shape, and a rollout would need a third GPU
    elif found and 0 < scenario.low < scenario.high:
        _scale_to_low(scenario, observer)
    _apply(rival.classes())
    if scenario.rival:
        _start_rival(scenario, observer)
    if scenario.adapters:
        adapters.write_all(CACHES / "adapters")
    _apply(result["manifest"])
    if scenario.tuning:
        _apply(scenarios.without_tuning(result["manifest"]))
        _wait_ready(1, observer, rival.RIVAL)
    observer.mark("applied")


def _load_and_follow(
    scenario: Scenario, capacity: float, workers: int, observer: Observer, result: dict[str, Any]
) -> None:
    """The load, with requests to the rival, and with the replicas that another policy orders. Raises StepFailed."""
    trace = ROOT / "traces" / f"{scenario.name}.csv"
    result["trace_sha256"] = scenarios.write_trace(scenario, capacity, trace)
    probing = rival.Probe() if scenario.rival else contextlib.nullcontext()
    following = contextlib.nullcontext() if scenario.policy == PLIMSOLL else Follower(scenario, observer)
    with probing as probe, following as follower:
        _load(scenario, trace, workers, observer, result)
    if probe:
        result["rival"] = probe.results
        kubectl("delete", "inferenceservice", rival.RIVAL, "-n", NAMESPACE, "--wait=false")
    if follower:
        result["follower"] = follower.samples
        if follower.error:
            raise StepFailed(follower.error)


def _is_alike(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the engines of one spec serve another without new pods."""
    pods = [
        (
            {name: tier["pod"] for name, tier in spec["tiers"].items()},
            spec["engine"].get("lora"),
            "itl" in spec.get("slo", {}),
        )
        for spec in (old, new)
    ]
    return pods[0] == pods[1]


def _apply(document: Mapping[str, Any]) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps(document))


def _scale_to_low(scenario: Scenario, observer: Observer) -> None:
    """Plimsoll keeps `low` of the engines of the scenario before, whatever policy follows. Raises StepFailed."""
    _apply(scenarios.manifest(dataclasses.replace(scenario, high=scenario.low, policy=PLIMSOLL), product=gpu_product()))
    wait_for(lambda: len(engine_pods()) == scenario.low, f"{scenario.low} engines", READY_S)
    observer.mark("engines of the scenario before", count=scenario.low)


def _start_rival(scenario: Scenario, observer: Observer) -> None:
    """Until the rival is ready: the first service must leave it a GPU meanwhile. Raises StepFailed."""
    first = scenarios.manifest(dataclasses.replace(scenario, high=scenario.low))
    _apply(first)
    _apply(rival.manifest_of(first))
    _wait_ready(1, observer, rival.RIVAL)


def _delete_services(observer: Observer) -> None:
    """Until no pod is left. Raises StepFailed."""
    kubectl("delete", "inferenceservices", "--all", "-n", NAMESPACE, "--wait=false")
    wait_for(lambda: not engine_pods(), "the end of all engines", DELETE_S)
    observer.mark("services deleted")


def _wait_ready(count: int, observer: Observer, service: str = SERVICE) -> None:
    deadline = time.monotonic() + READY_S
    seen = ""
    while sum(is_ready(pod) for pod in engine_pods() if pod["metadata"]["name"].startswith(f"{service}-")) < count:
        pods = ", ".join(f"{pod['metadata']['name']} {_pod_words(pod)}" for pod in engine_pods())
        if pods != seen:
            observer.mark("engines", pods=pods)
            seen = pods
        if time.monotonic() > deadline:
            raise StepFailed(f"{count} ready engines: not within {READY_S:.0f} s; {pods}")
        time.sleep(0.5)
    observer.mark("engines are ready", count=count, service=service)


def _pod_words(pod: Mapping[str, Any]) -> str:
    status = pod.get("status", {})
    waiting = [
        (one.get("state", {}).get("waiting") or one.get("state", {}).get("terminated") or {}).get("reason", "")
        for one in status.get("containerStatuses", [])
    ]
    return " ".join([str(status.get("phase")), *filter(None, waiting)])


def _first_answer(observer: Observer, seconds: float) -> float:
    """Seconds until the gateway answers a short request with 200. Raises StepFailed."""
    began = time.monotonic()
    body = json.dumps(client.request_body(client.prompt((1,), 64), 8, stream=False)).encode()
    answer = ""
    while time.monotonic() - began < seconds:
        request = urllib.request.Request(
            GATEWAY_URL + client.COMPLETIONS, data=body, headers={"content-type": "application/json"}
        )
        try:
            with _DIRECT.open(request, timeout=seconds) as response:
                if response.status == 200:
                    observer.mark("first answer", seconds=round(time.monotonic() - began, 2))
                    return round(time.monotonic() - began, 2)
        except urllib.error.HTTPError as error:
            answer = f"{error.code} {error.read()[:200]!r}"
        except OSError as error:
            answer = str(error)
        time.sleep(0.5)
    raise StepFailed(f"no answer from the gateway within {seconds:.0f} s; the last one: {answer}")


def _load(scenario: Scenario, trace: Path, workers: int, observer: Observer, result: dict[str, Any]) -> None:
    observer.mark("load", requests=len(trace.read_text().splitlines()) - 1, seconds=scenario.seconds)
    lead_s = client.START_S
    timers = [threading.Timer(lead_s + act.at_s, _safely, (observer, act, scenario)) for act in scenario.acts]
    for timer in timers:
        timer.start()
    result["load_began"] = time.time() + lead_s
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(_send, scenario, scenario.beside, workers, result) if scenario.beside else None
        result["requests"] = client.run(
            trace, GATEWAY_URL, ROOT / "traces" / f"{scenario.name}.requests.json",
            workers=workers, seed=scenario.seed, drain_s=_DRAIN_S, models=scenario.names,
        )  # fmt: skip
        if second:
            result["beside"] = second.result()
            result["beside_figures"] = summary(result["beside"], scenario)
            observer.mark("the second load", **result["beside_figures"])
    for timer in timers:
        timer.cancel()
    for key, name in (("gaps", scenario.name), ("beside_gaps", f"{scenario.name}.beside")):
        with contextlib.suppress(FileNotFoundError):
            result[key] = json.loads((ROOT / "traces" / f"{name}.requests.json").read_text())["gaps"]
    result["figures"] = figures(result["requests"], scenario)
    observer.mark("load is over", **result["figures"]["all"])


def _send(scenario: Scenario, beside: Beside, workers: int, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The second load; its requests."""
    trace = ROOT / "traces" / f"{scenario.name}.beside.csv"
    traces.write(trace, scenarios.trace_beside(beside, scenario, result["capacity_per_s"]))
    return client.run(
        trace, GATEWAY_URL, trace.with_suffix(".requests.json"),
        workers=workers, seed=scenario.seed, drain_s=_DRAIN_S, models=beside.names,
    )  # fmt: skip


def figures(rows: Sequence[Mapping[str, Any]], scenario: Scenario) -> dict[str, Any]:
    """Of all requests and of each phase: how many were offered, answered, within the SLO; statuses; percentiles."""
    found = {"all": summary(rows, scenario)}
    begin = 0.0
    for number, (share, seconds) in enumerate(scenario.phases):
        part = [row for row in rows if begin <= row["at_s"] < begin + seconds]
        found[f"{number}: {share:g} for {seconds:g} s"] = summary(part, scenario)
        begin += seconds
    return found


def summary(rows: Sequence[Mapping[str, Any]], scenario: Scenario) -> dict[str, Any]:
    """Of these requests: offered, within the scenario's SLO, statuses, percentiles of TTFT and TPOT."""
    first = [row["first_s"] + row["late_s"] for row in rows if row["ok"] and row["first_s"] is not None]
    each = [(row["last_s"] - row["first_s"]) / (row["output"] - 1) for row in rows if row["ok"] and row["output"] > 1]
    within = sum(_within(row, scenario) for row in rows)
    statuses: dict[str, int] = {}
    for row in rows:
        key = "cut" if row["status"] == 200 and not row["ok"] else str(row["status"])
        statuses[key] = statuses.get(key, 0) + 1
    return {
        "offered": len(rows),
        "within": within,
        "share": round(within / len(rows), 4) if rows else None,
        "statuses": statuses,
        "ttft_p50": scenarios.percentile(first, 50),
        "ttft_p95": scenarios.percentile(first, 95),
        "tpot_p50": scenarios.percentile(each, 50),
        "tpot_p95": scenarios.percentile(each, 95),
    }


def _within(row: Mapping[str, Any], scenario: Scenario) -> bool:
    if not row["ok"] or row["first_s"] is None:
        return False
    each = (row["last_s"] - row["first_s"]) / (row["output"] - 1) if row["output"] > 1 else 0.0
    return bool(row["first_s"] + row["late_s"] <= scenario.ttft_s and each <= scenario.tpot_s)


def _safely(observer: Observer, act: Act, scenario: Scenario) -> None:
    try:
        _ACTS[act.what](observer, scenario)
    except (StepFailed, OSError, LookupError) as error:
        observer.mark(f"{act.what} failed", error=str(error))


def _signal_core(number: int, what: str) -> Callable[[Observer, Scenario], None]:
    def act(observer: Observer, _scenario: Scenario) -> None:
        ready = [pod for pod in engine_pods() if is_ready(pod)]
        if not ready:
            raise LookupError("no ready engine")
        pid = core_pid(ready[0]["metadata"]["uid"])
        os.kill(pid, number)
        observer.mark(what, pod=ready[0]["metadata"]["name"], pid=pid)

    return act


def core_pid(pod_uid: str) -> int:
    """The process of a pod that computes, as this machine counts. Raises LookupError."""
    forms = (pod_uid, pod_uid.replace("-", "_"))
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            groups = (folder / "cgroup").read_text()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if any(form in groups for form in forms) and any(mark in command for mark in _CORE_MARKS):
                return int(folder.name)
    raise LookupError(f"no engine core in pod {pod_uid}")


def _delete(observer: Observer, _scenario: Scenario) -> None:
    ready = [pod for pod in engine_pods() if is_ready(pod)]
    if not ready:
        raise LookupError("no ready engine")
    name = ready[0]["metadata"]["name"]
    kubectl("delete", "pod", name, "-n", NAMESPACE, "--wait=false")
    observer.mark("deleted", pod=name)


def _restart_operator(observer: Observer, _scenario: Scenario) -> None:
    kubectl("delete", "pod", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator", "--wait=false")
    observer.mark("operator deleted")


def _change(what: str) -> Callable[[Observer, Scenario], None]:
    def act(observer: Observer, scenario: Scenario) -> None:
        _apply(scenarios.manifest(scenario, version=1, product=gpu_product()))
        observer.mark(what)

    return act


_ACTS: Final[Mapping[str, Callable[[Observer, Scenario], None]]] = {
    "kill": _signal_core(signal.SIGKILL, "killed"),
    "stop": _signal_core(signal.SIGSTOP, "stopped"),
    "delete": _delete,
    "rollout": _change("rollout"),
    "add adapters": _change("adapters added"),
    "restart operator": _restart_operator,
}


def _to_zero_and_back(observer: Observer, result: dict[str, Any]) -> None:
    """Waits for the end of the last engine, then asks: what the held requests waited."""
    began = time.monotonic()
    while engine_pods():
        if time.monotonic() - began > ZERO_S:
            raise StepFailed(f"not at zero within {ZERO_S:.0f} s")
        time.sleep(0.5)
    result["to_zero_s"] = round(time.monotonic() - began, 1)
    observer.mark("at zero", seconds=result["to_zero_s"])
    held = [threading.Thread(target=lambda: waits.append(_first_answer(observer, HELD_S))) for _ in range(3)]
    waits: list[float] = []
    for thread in held:
        thread.start()
    for thread in held:
        thread.join(HELD_S + 5)
    result["held_s"] = waits
    observer.mark("held requests are answered", seconds=waits)
    if len(waits) < len(held):
        raise StepFailed(f"{len(held) - len(waits)} held requests were not answered")


def _start_again(times: int, observer: Observer, result: dict[str, Any]) -> None:
    """Deletes the engine's pod and awaits the next one, again and again; each start as the launcher reports it.

    Raises StepFailed.
    """
    result["starts"] = []
    for number in range(times):
        wait_for(lambda: len(engine_pods()) == 1, "the end of the engine before", DELETE_S)
        pod, began, busy_s = engine_pods()[0]["metadata"]["name"], time.monotonic(), cpu_busy_s(_CPU_TIMES)
        kubectl("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
        observer.mark("deleted", pod=pod)
        _wait_ready(1, observer)
        seconds = time.monotonic() - began
        cores = round((cpu_busy_s(_CPU_TIMES) - busy_s) / seconds, 2)
        started = [one for one in engine_pods() if is_ready(one)][-1]
        result["starts"].append(
            {
                "pod": started["metadata"]["name"],
                "until_ready_s": round(seconds, 1),
                "phases": json.loads(fetch_from_engine(started, "about"))["phases"],
                "busy_cores": cores,
                "first_answer_s": _first_answer(observer, HELD_S),
            }
        )
        observer.mark("started again", number=number + 1, **result["starts"][-1])


def cpu_busy_s(path: Path) -> float:
    """Seconds in which the machine's cores have worked, all of them together."""
    user, nice, system, _idle, _waiting, interrupts, soft, *_ = map(int, path.read_text().splitlines()[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
