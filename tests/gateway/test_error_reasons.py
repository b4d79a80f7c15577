"""One closed set of reasons for refusals, whoever says them: each is in the documentation, with its status."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from launcher.errors import RejectionReason as EngineReason
from plimsoll.gateway.envoy import local_reply
from plimsoll.gateway.errors import STATUS_BY_REASON

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "request-lifecycle.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d{3}) \| ([\w, ]+) \| [^|]+ \|$", re.MULTILINE)
ENGINE = {EngineReason.BODY_TOO_LARGE: 413, EngineReason.REQUEST_TOO_LARGE: 400}  # all others are 503


class ReasonUse(NamedTuple):
    """A reason, its status, and who says it."""

    reason: str
    status: int
    by: str


def documented_reasons() -> list[ReasonUse]:
    return [
        ReasonUse(reason, int(status), by)
        for reason, status, who in ROW.findall(PAGE.read_text())
        for by in who.split(", ")
    ]


def coded_reasons() -> set[ReasonUse]:
    envoy = {ReasonUse(words.code, status, "Envoy") for status, words in local_reply.REPLIES.items()}
    others = {
        local_reply.OVERLOADED_STATUS: local_reply.OVERLOADED_REPLY,
        400: local_reply.TWO_HOSTS,
        403: local_reply.PREFLIGHT,
        404: local_reply.NOT_STORED,
        415: local_reply.UNTYPED,
        504: local_reply.DEADLINE_PASSED,
    }
    envoy |= {
        ReasonUse(words.code, status, "Envoy") for status, words in (others | {503: local_reply.DRAINING}).items()
    }
    envoy.add(ReasonUse(local_reply.PLAIN_HTTP.code, 400, "Envoy"))
    envoy |= {
        ReasonUse(words.code, 429, "Envoy") for words in (local_reply.BODIES_REPLY, local_reply.OVERLOADED_GATEWAY)
    }
    engine = {ReasonUse(r.value, ENGINE.get(r, 503), "engine") for r in EngineReason}
    return {ReasonUse(reason.value, status, "picker") for reason, status in STATUS_BY_REASON.items()} | envoy | engine


def test_every_reason_is_documented_and_used() -> None:
    assert set(documented_reasons()) == coded_reasons()
    assert len(documented_reasons()) == len(coded_reasons())


def test_envoy_default_reason_is_known() -> None:
    assert local_reply.DEFAULT_REPLY.code in {words.code for words in local_reply.REPLIES.values()}


def test_reason_has_one_status() -> None:
    reasons = {said.reason for said in coded_reasons()}
    assert len({(said.reason, said.status) for said in coded_reasons()}) == len(reasons)


def test_envoy_local_reply_names_reason_and_retry() -> None:
    mappers = local_reply.local_reply_config(1 << 20)["mappers"][1:]  # the first passes on what the picker said
    for mapper in mappers:
        headers = {each["header"]["key"]: each["header"]["value"] for each in mapper["headers_to_add"]}
        body = mapper["body_format_override"]["json_format"]
        assert headers["x-plimsoll-reason"] == body["error"].get("code", headers["x-plimsoll-reason"])
        assert ("code" in body["error"]) != (body.get("type") == "error"), "OpenAI's shape or Anthropic's"
        assert ("retry-after" in headers) != ("x-should-retry" in headers)
