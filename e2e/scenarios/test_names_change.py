"""A service's model name is added, changed and removed under load: no request fails, and no engine is restarted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack

import httpx

from e2e.lib.client import Prompt, Target
from e2e.lib.kube import Cluster, Object, uids
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.request_log import RequestLog
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until

USERS = 2  # of each name
FLOW_S = 8.0  # under each state of the names
ADDED, CHANGED = "names-added", "org/names-changed-2.0"


def test_names_changing_under_load_lose_no_request(service: Callable[[str], Service], cluster: Cluster) -> None:
    chat = service("chat")
    cluster.apply(make_manifest("chat", {"serve": {}}), namespace=chat.namespace)
    chat.wait_ready()
    engines, ledgers = uids(chat.pods()), dict[str, RequestLog]()
    with ExitStack() as loads:
        for name in (chat.name, chat.key):
            ledgers[name] = loads.enter_context(_flow(chat, name)).ledger
        for name in (ADDED, CHANGED, None):
            _claim(cluster, chat, name)
            _wait_listed_first(chat, name or chat.name)
            _names_are_true(chat)
            if name is not None:
                ledgers[name] = loads.enter_context(_flow(chat, name)).ledger
            sleep(FLOW_S)
    for name, ledger in ledgers.items():
        print(f"{name}: {ledger.summary()}")
        assert not ledger.failures, ledger.explain()
        assert ledger.records, f"nothing was asked under {name}"
    former = {one.partition(" until ")[0] for one in chat.status()["formerNames"]}
    assert former == {ADDED, CHANGED}
    assert uids(chat.pods()) == engines, "a change of names replaced engines"
    assert _restarts(chat.pods()) == 0


def test_names_former_one_goes_to_who_claims_it(service: Callable[[str], Service], cluster: Cluster) -> None:
    """The service that claims it has no engine, so that its answer cannot be taken for the former owner's."""
    first, heir = service("former"), service("heir")
    nowhere = {"serve": {"pod": {"nodeSelector": {"example.com/nowhere": "yes"}}}}
    cluster.apply(make_manifest("former", nowhere, model={"name": "names-inherited"}), namespace=first.namespace)
    wait_until("the name is listed", lambda: "names-inherited" in first.status().get("modelNames", ()))
    _claim(cluster, first, None)
    wait_until("it is a former name", lambda: first.status().get("formerNames"))
    assert "names-inherited" in first.status()["modelNames"]
    cluster.apply(make_manifest("heir", nowhere, model={"name": "names-inherited"}), namespace=heir.namespace)
    wait_until("the heir lists it", lambda: heir.status().get("modelNames", [""])[0] == "names-inherited")
    wait_until("the former owner does not", lambda: "names-inherited" not in first.status()["modelNames"])
    assert "formerNames" not in first.status()
    for one in (first, heir):
        cluster.delete("inferenceservices", one.name, namespace=one.namespace)


def _flow(service: Service, name: str) -> Load:
    """Users who ask for a service by one of its names."""
    start = time.time()

    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(30, f"{name} {start} {n}"), max_tokens=12)

    source = f"names-{name.replace('/', '-')}"
    return Load(Target(service.url, name), ClosedLoop(USERS, prompts, think_s=0.5), source=source)


def _claim(cluster: Cluster, service: Service, name: str | None) -> None:
    """Sets or removes spec.model.name."""
    cluster.patch("inferenceservices", service.name, service.namespace, {"spec": {"model": {"name": name}}})


def _wait_listed_first(service: Service, name: str) -> None:
    wait_until(f"{name} is the first name", lambda: service.status().get("modelNames", [""])[0] == name)


def _names_are_true(service: Service) -> None:
    """Every name in the status is answered, whole and streamed, under itself; the gateway lists the first one."""
    names = service.status()["modelNames"]
    found = httpx.get(f"{service.url}/v1/models", timeout=60, trust_env=False).json()["data"]
    listed = [model["id"] for model in found]
    print(f"names {names}; models {listed}")
    assert names[0] in listed
    assert not set(names[1:]) & set(listed)
    assert not service.condition("ModelNameRejected")
    for name in names:
        assert _answered_as(service, name, stream=False) == {name}
        assert _answered_as(service, name, stream=True) == {name}


def _answered_as(service: Service, name: str, *, stream: bool) -> set[str]:
    """The `model` of an answer, or of all its events."""
    body: Object = {"model": name, "prompt": f"as {name} {time.time()}", "max_tokens": 4, "stream": stream}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    parts = [line.removeprefix("data: ") for line in answer.text.splitlines() if line] if stream else [answer.text]
    return {json.loads(part)["model"] for part in parts if part != "[DONE]"}


def _restarts(pods: list[Object]) -> int:
    return sum(status["restartCount"] for pod in pods for status in pod["status"].get("containerStatuses", ()))
