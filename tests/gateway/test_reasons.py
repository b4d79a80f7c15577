"""One closed set of reasons for refusals, whoever says them: each is in the documentation, with its status."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from launcher.errors import Reason as EngineReason
from plimsoll.gateway import localreply
from plimsoll.gateway.replies import STATUS

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "request.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d{3}) \| ([\w, ]+) \| [^|]+ \|$", re.MULTILINE)
ENGINE = {EngineReason.BODY_TOO_LARGE: 413, EngineReason.REQUEST_TOO_LARGE: 400}  # all others are 503


class Said(NamedTuple):
    """A reason, its status, and who says it."""

    reason: str
    status: int
    by: str


def documented() -> list[Said]:
    return [
        Said(reason, int(status), by) for reason, status, who in ROW.findall(PAGE.read_text()) for by in who.split(", ")
    ]


def coded() -> set[Said]:
    envoy = {Said(words.code, status, "Envoy") for status, words in localreply.WORDS.items()}
    others = {localreply.FULL: localreply.FULL_WORDS, 400: localreply.TWO_HOSTS, 403: localreply.PREFLIGHT}
    envoy |= {Said(words.code, status, "Envoy") for status, words in (others | {503: localreply.DRAINING}).items()}
    engine = {Said(r.value, ENGINE.get(r, 503), "engine") for r in EngineReason}
    return {Said(reason.value, status, "picker") for reason, status in STATUS.items()} | envoy | engine


def test_every_reason_is_documented_and_every_documented_one_is_said() -> None:
    assert set(documented()) == coded()
    assert len(documented()) == len(coded())


def test_what_envoy_says_of_any_other_status_is_a_reason_too() -> None:
    assert localreply.OTHERS.code in {words.code for words in localreply.WORDS.values()}


def test_a_reason_has_one_status_whoever_says_it() -> None:
    reasons = {said.reason for said in coded()}
    assert len({(said.reason, said.status) for said in coded()}) == len(reasons)


def test_each_of_envoys_replies_names_its_reason() -> None:
    mappers = localreply.local_reply_config(1 << 20)["mappers"][1:]  # the first passes on what the picker said
    for mapper in mappers:
        told = {each["header"]["key"]: each["header"]["value"] for each in mapper["headers_to_add"]}
        assert told["x-plimsoll-reason"] == mapper["body_format_override"]["json_format"]["error"]["code"]
        assert ("retry-after" in told) != ("x-should-retry" in told)
