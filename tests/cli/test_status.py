"""A status in, text out; and statuses that another version, or nobody, has written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.output import Screen
from plimsoll.cli.status import status_lines
from plimsoll.core.errors import BackendUnavailable
from tests import builders
from tests.cli import fake_kube

PIPE = Screen()
NOW_S = 1767229200.0  # an hour after the builders' services were made, 2026-01-01T01:00:00Z

STATUS: dict[str, Any] = {
    "url": "http://gateway.plimsoll-system.svc",
    "modelNames": ["chat", "team/chat"],
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving", "message": "2 gateways list an endpoint"},
        {"type": "SLOMet", "status": "False", "reason": "SLOViolated", "message": "TTFT 91% within 500ms"},
        {
            "type": "ScalingLimited",
            "status": "True",
            "reason": "AtMaxReplicas",
            "message": "6 wanted, maxReplicas is 5",
        },
    ],
    "tiers": {
        "prefill": {"summary": "1/1"},
        "decode": {
            "needed": 6,
            "summary": "3/5",
            "startingPods": "2, 1 overdue, next at 2026-01-01T01:00:24Z",
            "capacityPerReplica": "9.1 req/s, 110% used",
        },
    },
    "slo": {
        "ttft": "700ms",
        "tpot": "38ms",
        "attainment": "90%",
        "attainmentIncludingRejected": "87%",
    },
    "limitedBy": "decode TPOT",
}
CHAT = builders.service(slo={"ttft": "500ms", "ttftPerKToken": "100ms", "tpot": "50ms"}) | {"status": STATUS}
FRESH = builders.service("fresh")
AGGREGATED = builders.service("draft", "lab") | {
    "status": {
        "conditions": [{"type": "Ready", "status": "False", "reason": "Starting", "message": "m"}],
        "tiers": {"serve": {"summary": "0/1"}},
    }
}
GOLDEN = (Path(__file__).parent / "status.txt").read_text()


def cluster(*services: Any) -> fake_kube.FakeKube:
    """A cluster with these services, the first of which can be asked for by name."""
    namespaces = {one["metadata"]["namespace"] for one in services}
    of = {name: [one for one in services if one["metadata"]["namespace"] == name] for name in namespaces}
    answers: dict[str, Any] = {fake_kube.services(name): {"items": found} for name, found in of.items()}
    for one in services:
        answers[fake_kube.services(one["metadata"]["namespace"], one["metadata"]["name"])] = one
    return fake_kube.FakeKube(
        {fake_kube.SERVICES: {"items": list(services)}, fake_kube.services("void"): {"items": []}} | answers
    )


async def shown(service: Any, screen: Screen = PIPE, name: str | None = "chat") -> list[str]:
    return await status_lines(cluster(service), service["metadata"]["namespace"], name, screen, NOW_S)


async def test_status_namespace_is_a_table_of_services() -> None:
    lines = await status_lines(cluster(CHAT, FRESH, AGGREGATED), "team", None, PIPE, NOW_S)
    assert lines == [
        "NAME   READY  PREFILL  DECODE  TTFT   TPOT  ATTAINMENT  LIMITED-BY   AGE  REASON",
        "chat   True   1/1      3/5     700ms  38ms  90%         decode TPOT  60m  Serving",
        "fresh  -      -        -       -      -     -           -            60m  -",
    ]


async def test_status_e2e_is_shown_when_targeted() -> None:
    slo = {"ttft": "500ms", "e2e": "20s"}
    document = STATUS | {"slo": STATUS["slo"] | {"e2e": "9.4s"}}
    whole = builders.service("whole", slo=slo) | {"status": document}
    head, chat, line = await status_lines(cluster(CHAT, whole), "team", None, PIPE, NOW_S)
    at = head.index("E2E")
    assert (chat[at : at + 4].strip(), line[at : at + 4]) == ("-", "9.4s")
    lines = await shown(whole, name="whole")
    assert "E2E   20s     9.4s" in lines
    assert "90% of the completed and 87% of all requests of the last minute met the SLO" in lines


async def test_status_tuned_arguments_are_one_line() -> None:
    text = "serve: --max-num-batched-tokens=1024 (itl 40ms)"
    tuned = builders.service("tuned") | {"status": STATUS | {"engineTuning": text}}
    plain = builders.service("plain") | {"status": STATUS}
    lines = await shown(tuned, name="tuned")
    assert f"engine arguments  {text}" in lines
    assert len(lines) - len(await shown(plain, name="plain")) == 2  # with the empty line before it


async def test_status_model_revision_is_one_line() -> None:
    pinned = builders.service("pinned") | {"status": STATUS | {"modelRevision": "sha256:0f"}}
    assert "model revision  sha256:0f" in await shown(pinned, name="pinned")


async def test_status_itl_is_shown_when_targeted() -> None:
    document = STATUS | {"slo": STATUS["slo"] | {"itl": "31ms"}}
    even = builders.service("even", slo={"ttft": "500ms", "itl": "40ms"}) | {"status": document}
    head, chat, line = await status_lines(cluster(CHAT, even), "team", None, PIPE, NOW_S)
    at = head.index("ITL")
    assert (chat[at : at + 4].strip(), line[at : at + 4]) == ("-", "31ms")
    assert "ITL P99  40ms    31ms" in await shown(even, name="even")


async def test_status_lost_model_name_names_holder() -> None:
    message = "spec.model.name chat: service bank/chat holds the name since 2026-03-01T00:00:00Z; clients reach this"
    lost = {"type": "ModelNameRejected", "status": "True", "reason": "ModelNameTaken", "message": message}
    late = builders.service("late") | {"status": {"modelNames": ["team/late"], "conditions": [lost]}}
    text = " ".join(" ".join(await shown(late, name="late")).split())
    assert f"ModelNameRejected True ModelNameTaken {message}" in text
    assert "model team/late" in text


async def test_status_unavailable_attainment_gives_reason() -> None:
    document = STATUS | {
        "slo": {
            "ttft": "700ms",
            "unavailableReason": "TPOT is not known: nobody tells",
        }
    }
    blind = builders.service("blind", slo={"ttft": "500ms", "tpot": "50ms"}) | {"status": document}
    lines = await shown(blind, name="blind")
    assert "TPOT  50ms    -" in lines
    assert "attainment unknown: TPOT is not known: nobody tells" in lines


async def test_status_all_namespaces_sorted_and_not_ready_highlighted() -> None:
    lines = await status_lines(cluster(CHAT, AGGREGATED), None, None, Screen(supports_colour=True), NOW_S)
    assert [line.split()[0].removeprefix("\x1b[1m").removeprefix("\x1b[31m") for line in lines] == [
        "NAMESPACE",
        "lab",
        "team",
    ]
    assert "SERVE" in lines[0]
    assert lines[1].startswith("\x1b[31m")
    assert "0/1" in lines[1]
    assert "\x1b" not in lines[2]


async def test_status_no_services_says_so() -> None:
    assert await status_lines(cluster(CHAT), "void", None, PIPE, NOW_S) == ["no InferenceServices in namespace void"]
    assert await status_lines(cluster(), None, None, PIPE, NOW_S) == ["no InferenceServices in any namespace"]


async def test_status_one_service_matches_golden_text() -> None:
    assert "\n".join(await shown(CHAT, Screen(100))) + "\n" == GOLDEN


async def test_status_terminal_wraps_and_highlights_problems() -> None:
    lines = await shown(CHAT, Screen(70, supports_colour=True))
    red = [line for line in lines if line.startswith("\x1b[31m")]
    assert [line.removeprefix("\x1b[31m").split()[0] for line in red] == ["SLOMet", "ScalingLimited"]


async def test_status_service_without_status_says_so() -> None:
    assert await shown(FRESH, name="fresh") == [
        "team/fresh  no URL yet",
        "",
        "no conditions yet: the operator has not reconciled the service",
        "",
        "no SLO: spec.slo is not set",
    ]


async def test_status_unknown_name_or_cluster_is_an_error() -> None:
    with pytest.raises(ClusterQueryError, match="did you mean chat"):
        await status_lines(cluster(CHAT), "team", "cat", PIPE, NOW_S)
    with pytest.raises(BackendUnavailable):
        await status_lines(
            fake_kube.FakeKube({fake_kube.SERVICES: BackendUnavailable("away")}), None, None, PIPE, NOW_S
        )


@pytest.mark.parametrize("field", [*STATUS, "status", "spec", "metadata.creationTimestamp"])
async def test_status_malformed_field_still_shows_the_rest(field: str) -> None:
    nonsense: tuple[Any, ...] = (
        None,
        True,
        -1,
        1e400,
        "",
        "x\x1b[2J\ny",
        [],
        [None],
        [[]],
        {},
        {"a": 7},
        [{"type": 7}],
    )
    for value in nonsense:
        odd: Any = {**CHAT, "metadata": dict(CHAT["metadata"]), "status": dict(STATUS)}
        if field in odd:
            odd[field] = value
        elif field.startswith("metadata"):
            odd["metadata"]["creationTimestamp"] = value
        else:
            odd["status"][field] = value
        for name in ("chat", None):
            for screen in (PIPE, Screen(40)):
                assert "\x1b" not in "".join(await shown(odd, screen, name))


@pytest.mark.parametrize(
    ("starting", "words"),
    [
        ("2, next at 2026-01-01T01:00:24Z", "2, next in 24s"),
        ("1, next at 2026-01-01T00:59:00Z", "1, next now"),
        ("3, 3 overdue", "3 overdue"),
        ("1", "1"),
        ("0", "-"),
        ("two", "-"),
        ({"count": 1}, "-"),
        ("1, next at soon", "1"),
        (None, "-"),
    ],
)
async def test_status_starting_replicas_are_summarised(starting: Any, words: str) -> None:
    tiers = {"serve": {"summary": "1/4", "startingPods": starting}}
    lines = await shown({**CHAT, "status": {**STATUS, "tiers": tiers}})
    (line,) = [line for line in lines if line.startswith("serve")]
    assert re.split("  +", line)[2] == words


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("2026-01-01T00:59:30Z", "30s"),
        ("2026-01-01T02:00:00Z", "0s"),
        ("2025-12-30T00:00:00Z", "2d"),
        ("2026-13-01T00:00:00Z", "-"),
        ("yesterday", "-"),
        (7, "-"),
    ],
)
async def test_status_age_format(made: Any, words: str) -> None:
    odd = {**FRESH, "metadata": FRESH["metadata"] | {"creationTimestamp": made}}
    assert (await shown(odd, name=None))[1].split()[-2] == words


async def test_target_without_a_port_has_no_url_to_wait_for() -> None:
    unrouted, routed = {"serve": {}}, {"serve": {"port": 8000}}
    for targets, url in ((unrouted, "no URL: requests do not pass gateways"), (routed, "no URL yet")):
        service = {**FRESH, "spec": {"targets": targets}}
        [first, *_] = await shown(service, name="fresh")
        assert first == f"team/fresh  {url}"
