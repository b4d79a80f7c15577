"""What is seen of the cluster while a scenario runs: service and pods once a second, the cards, and all at the end."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from e2e.gpu.processes import get
from e2e.gpu.scenarios import SERVICE
from e2e.gpu.settings import LOGS, NAMESPACE, ROOT, SYSTEM
from e2e.lib.background import BackgroundThread

_POLL_S: Final = 1.0
_GPU_FIELDS: Final = "timestamp,index,utilization.gpu,memory.used,power.draw,clocks.sm"
_LAUNCHER_PORT: Final = 8001
_GATEWAY_PORT: Final = 8081
_POD_PRESSURE: Final = Path("/sys/fs/cgroup/kubepods/cpu.pressure")
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Observer(BackgroundThread):
    """A context manager; `samples` has a line a second, `marks` what the scenario did and when."""

    def __init__(self) -> None:
        super().__init__(self._watch, 10)
        self.samples: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self.began = time.time()
        self._cards: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits", "-l", "1"]
            with (LOGS / "cards.csv").open("ab") as log:
                self._cards = subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._cards:
            self._cards.terminate()
            self._cards.wait(5)

    def mark(self, what: str, **more: Any) -> None:
        """Writes down that something was done now."""
        self.marks.append({"at": round(time.time(), 2), "what": what, **more})
        print(f"{time.time() - self.began:7.1f} s  {what} {more or ''}", flush=True)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            found = get(f"inferenceservices/{SERVICE}", "-n", NAMESPACE)
            pods = get("pods", "-n", NAMESPACE) or {"items": []}
            status = (found or {}).get("status", {})
            tiers = status.get("tiers", {})
            self.samples.append(
                {
                    "at": round(time.time(), 2),
                    "tier": tiers.get("serve", tiers),
                    "cpu_wait_s": cpu_wait_s(_POD_PRESSURE),
                    "slo": status.get("slo"),
                    "limited_by": status.get("limitedBy"),
                    "pods": [_pod(pod) for pod in pods["items"]],
                }
            )


def cpu_wait_s(path: Path) -> float | None:
    """Seconds for which some process of a control group has waited for a core; None where the kernel does not count."""
    try:
        some = path.read_text().splitlines()[0]
    except OSError:
        return None
    return int(some.rsplit("total=", 1)[1]) / 1e6


def _pod(pod: Mapping[str, Any]) -> dict[str, Any]:
    status = pod.get("status", {})
    conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
    containers = status.get("containerStatuses", [])
    return {
        "name": pod["metadata"]["name"],
        "created": pod["metadata"]["creationTimestamp"],
        "deleting": "deletionTimestamp" in pod["metadata"],
        "phase": status.get("phase"),
        "ready": conditions.get("Ready") == "True",
        "restarts": sum(one.get("restartCount", 0) for one in containers),
    }


def engine_pods() -> list[dict[str, Any]]:
    """The engines' pods, the oldest first."""
    pods = (get("pods", "-n", NAMESPACE) or {"items": []})["items"]
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is ready and stays."""
    return bool(_pod(pod)["ready"]) and "deletionTimestamp" not in pod["metadata"]


def final_state() -> dict[str, Any]:
    """The service, Events, and what engines, gateway and operator say of themselves."""
    state: dict[str, Any] = {
        "service": get(f"inferenceservices/{SERVICE}", "-n", NAMESPACE),
        "events": _events(),
        "pods": engine_pods(),
        "admission": get("inferenceserviceadmissions", "-n", NAMESPACE),
        "scrapes": {},
    }
    for pod in state["pods"]:
        if pod.get("status", {}).get("podIP"):
            for path in ("about", "metrics"):
                state["scrapes"][f"{pod['metadata']['name']}/{path}"] = fetch_from_engine(pod, path)
    for pod in (get("pods", "-n", SYSTEM) or {"items": []})["items"]:
        address, name = pod.get("status", {}).get("podIP"), pod["metadata"]["name"]
        if address:
            state["scrapes"][f"{name}/metrics"] = _fetch(f"http://{address}:{_GATEWAY_PORT}/metrics")
    return state


def _events() -> list[dict[str, Any]]:
    items = (get("events", "-A") or {"items": []})["items"]
    return [
        {
            "at": one.get("eventTime") or one.get("lastTimestamp") or one.get("firstTimestamp"),
            "first": one.get("firstTimestamp"),
            "count": one.get("count"),
            "on": f"{one['involvedObject']['kind']}/{one['involvedObject'].get('name')}",
            "reason": one.get("reason"),
            "message": one.get("message"),
        }
        for one in items
    ]


def fetch_from_engine(pod: Mapping[str, Any], path: str = "metrics") -> str:
    """What the launcher of an engine answers; the error's text without an answer."""
    return _fetch(f"http://{pod['status']['podIP']}:{_LAUNCHER_PORT}/{path}")


def _fetch(url: str) -> str:
    try:
        with _DIRECT.open(url, timeout=5) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def pack_logs(target: Path) -> None:
    """The logs of the node's programs and of all pods, compressed."""
    folders = [folder for folder in ("log", "pods") if (ROOT / folder).exists()]
    subprocess.run(
        [
            "tar",
            "-C",
            str(ROOT),
            "-I",
            f"env LD_LIBRARY_PATH={ROOT}/parts {_zstd()} -9 -q",
            "-cf",
            str(target),
            *folders,
        ],
        check=False,
    )


def _zstd() -> str:
    carried = ROOT / "parts" / "zstd"
    return str(carried) if carried.exists() else "zstd"
