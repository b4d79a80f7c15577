"""What a request becomes in the ledger, and when a load sends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.lib.client import Prompt, Target
from e2e.lib.load import Arrival, ClosedLoop, Load, OpenLoop, poisson, unique_text
from e2e.lib.request_log import RequestRecord, RequestResult
from e2e.lib.wait import wait_until
from tests.e2e_lib.fake_engine_server import FakeEngineServer


@pytest.fixture
def engine() -> Iterator[tuple[FakeEngineServer, Target]]:
    made = FakeEngineServer()
    with made.running() as url:
        yield made, Target(url, "tiny")


def sent(target: Target, prompt: Prompt, patience_s: float = 10) -> RequestRecord:
    [record] = Load(target, OpenLoop([Arrival(0, prompt)]), patience_s=patience_s).run().records
    return record


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("whole", RequestResult.OK),
        ("cut", RequestResult.CUT),
        ("clean", RequestResult.NO_DONE),
        ("error", RequestResult.ERROR_EVENT),
        ("busy", RequestResult.REJECTED),
        ("drop", RequestResult.UNREACHABLE),
        ("hang", RequestResult.TIMEOUT),
    ],
)
def test_record_outcome_follows_wire_behaviour(
    kind: str, outcome: RequestResult, engine: tuple[FakeEngineServer, Target]
) -> None:
    record = sent(engine[1], Prompt(f"{kind} it", 3), patience_s=0.5)
    assert record.outcome is outcome
    assert bool(record.detail) is not record.ok or outcome is RequestResult.NO_DONE


def test_request_asks_for_exact_number_of_tokens(engine: tuple[FakeEngineServer, Target]) -> None:
    chat, plain = sent(engine[1], Prompt("whole", 5)), sent(engine[1], Prompt("whole", 2, chat=False))
    assert (chat.output_tokens, plain.output_tokens) == (5, 2)
    for body in engine[0].bodies:
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}
    assert chat.ttft_s is not None
    assert 0 < chat.ttft_s <= chat.ended_at - chat.sent_at


@pytest.mark.parametrize(("kind", "outcome"), [("whole", RequestResult.OK), ("cut", RequestResult.CUT)])
def test_record_of_response_not_streamed(
    kind: str, outcome: RequestResult, engine: tuple[FakeEngineServer, Target]
) -> None:
    record = sent(engine[1], Prompt(f"{kind} it", 5, stream=False))
    assert record.outcome is outcome
    assert "stream" not in engine[0].bodies[0]
    assert (record.text, record.output_tokens, record.tpot_s) == (("aaaaa", 5, None) if record.ok else ("", 0, None))


def test_record_has_plan_labels_and_tpot(engine: tuple[FakeEngineServer, Target]) -> None:
    record = sent(engine[1], Prompt("whole", 5, headers=(("x-who", "me"),), labels=(("class", "chat"),)))
    assert record.labels == (("class", "chat"),)
    assert record.tpot_s is not None
    assert 0 <= record.tpot_s <= (record.ended_at - record.sent_at) / 4
    assert sent(engine[1], Prompt("whole", 1)).tpot_s is None
    assert engine[0].heads[0]["x-who"] == "me"


def test_record_rejection_has_reason_and_retry_after(engine: tuple[FakeEngineServer, Target]) -> None:
    record = sent(engine[1], Prompt("busy"))
    assert (record.status, record.reason, record.retry_after_s) == (503, "overloaded", 1.0)


def test_record_connection_failure_is_unreachable() -> None:
    assert sent(Target("http://127.0.0.1:9", "tiny"), Prompt("whole")).outcome is RequestResult.UNREACHABLE


@pytest.mark.parametrize(
    "url", ["http://localhost:80", "http://10.0.0.1", "http://example.com", "http://127.0.0.1.example.com"]
)
def test_target_remote_address_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        Target(url, "tiny")


def test_open_loop_sends_everything_despite_failures(engine: tuple[FakeEngineServer, Target]) -> None:
    kinds = ["whole", "busy", "cut", "whole"]
    plan = OpenLoop([Arrival(0.01 * n, Prompt(kind, 2)) for n, kind in enumerate(kinds)])
    ledger = Load(engine[1], plan).run()
    assert ledger.totals()["failed"] == {"refused": 1, "cut": 1}
    assert ledger.totals()["ok"] == 2


def test_closed_loop_keeps_its_concurrency(engine: tuple[FakeEngineServer, Target]) -> None:
    def prompts(n: int) -> Prompt:
        return Prompt("whole" if n < 30 else "hang", 2)

    load = Load(engine[1], ClosedLoop(3, prompts), patience_s=0.3)
    with load:
        wait_until("30 answers", lambda: len(load.ledger.records) >= 30, 10, 0.01)
    assert engine[0].most_at_once == 3
    assert load.ledger.totals()["ok"] == 30


def test_load_stops_at_end_of_its_block(engine: tuple[FakeEngineServer, Target]) -> None:
    plan = OpenLoop(Arrival(3600.0 * n, Prompt("whole", 2)) for n in range(100))
    with Load(engine[1], plan) as load:
        wait_until("an answer", lambda: load.ledger.records, 10, 0.01)
    assert len(load.ledger.records) == 1


def test_poisson_arrivals_have_rate_and_repeat_with_seed() -> None:
    first, again = (list(poisson(5, 200, lambda n: Prompt(str(n)), seed=1).arrivals) for _ in range(2))
    assert first == again
    assert len(first) == pytest.approx(1000, rel=0.1)
    assert [a.at_s for a in first] == sorted(a.at_s for a in first)


def test_unique_texts_share_no_prefix() -> None:
    texts = [unique_text(50, seed) for seed in range(100)]
    assert len({text[:10] for text in texts}) == 100
    assert unique_text(50, 1) == unique_text(50, 1)
