"""An engine from which no first token comes although some are due gets no request that another one can take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.replica import SILENT_S
from plimsoll.core.admission.request import AdmissionRequest
from tests.core.test_admission_engine_rejection import CLASSES, SERVE

PERIOD_S = 0.05
FIRST_TOKEN_S, LENGTH_S = 0.2, 1.0  # the model predicts less


class Load:
    """Twenty requests a second at engines that answer later than predicted, until one hangs."""

    def __init__(self, *, engines: tuple[str, ...] = ("hangs", "runs"), is_stream: bool = True) -> None:
        self.controller = AdmissionController(CLASSES, SERVE, {})
        self.controller.set_replicas(dict.fromkeys(engines, SERVE.batch), 0.0)
        self.is_stream = is_stream
        self.sent: dict[str, list[float]] = {name: [] for name in engines}
        self.running: list[tuple[str, float, str]] = []

    def run(self, until_s: float, hangs_from_s: float) -> None:
        for number in range(round(until_s / PERIOD_S)):
            now = number * PERIOD_S
            self._answer(now, hangs_from_s)
            id = f"r{number}"
            request = AdmissionRequest(id, "chat", "t", now, 1000, max_tokens=100, is_stream=self.is_stream)
            address = self.controller.submit(request, now).address
            assert address is not None
            self.sent[address].append(now)
            self.running.append((id, now, address))

    def _answer(self, now: float, hangs_from_s: float) -> None:
        for id, at_s, address in list(self.running):
            if address == "hangs" and at_s + LENGTH_S > hangs_from_s:
                continue
            if self.is_stream and now >= at_s + FIRST_TOKEN_S:
                self.controller.record_first_token(id, now, FIRST_TOKEN_S)
            if now >= at_s + LENGTH_S:
                self.controller.complete(id, now, 100, FIRST_TOKEN_S)
                self.running.remove((id, at_s, address))

    def sent_between(self, address: str, begin_s: float, end_s: float) -> int:
        return sum(begin_s <= at_s < end_s for at_s in self.sent[address])


def test_hung_engine_gets_requests_for_two_seconds_at_most() -> None:
    load = Load()
    load.run(20.0, hangs_from_s=5.0)
    assert load.sent_between("hangs", 4.0, 5.0) > 5
    assert load.sent_between("hangs", 5.0 + SILENT_S + 0.5, 20.0) == 0


def test_engine_that_goes_on_is_silent_no_more() -> None:
    load = Load()
    load.run(20.0, hangs_from_s=5.0)
    replica = load.controller.pool.replicas["hangs"]
    assert replica.silence_s(20.0) > SILENT_S
    for id, at_s, address in load.running:
        if address == "hangs":
            load.controller.record_first_token(id, 20.0, 20.0 - at_s)
    assert replica.silence_s(30.0) == 0.0


def test_only_engine_gets_requests_in_its_silence() -> None:
    load = Load(engines=("hangs",))
    load.run(4.0, hangs_from_s=1.0)
    assert load.controller.pool.replicas["hangs"].silence_s(4.0) > SILENT_S
    assert load.sent_between("hangs", 0.0, 4.0) == 80


def test_response_in_one_piece_is_no_silence() -> None:
    load = Load(is_stream=False)
    load.run(4.0, hangs_from_s=1.0)
    assert load.controller.pool.replicas["hangs"].silence_s(4.0) == 0.0


def test_first_token_of_another_request_ends_the_silence() -> None:
    load = Load(engines=("hangs",))
    load.run(4.0, hangs_from_s=1.0)
    replica = load.controller.pool.replicas["hangs"]
    load.controller.record_first_token("r60", 4.0, 1.0)  # not the oldest: engines may serve by priority
    assert replica.silence_s(4.0) == 0.0
    assert replica.silence_s(4.0 + SILENT_S + 0.1) > SILENT_S


@pytest.mark.parametrize(("prompt_tokens", "wait_s"), [(75_000, 0.0), (1000, 4.5)], ids=["long prompt", "queued"])
def test_engine_is_not_silent_before_it_can_report_a_token(prompt_tokens: int, wait_s: float) -> None:
    """Running responses are reported at ages that double, and a request ages in the queue as well."""
    patient = replace(CLASSES[0], slo=replace(CLASSES[0].slo, ttft_s=10.0))
    controller = AdmissionController((patient,), SERVE, {})
    controller.set_replicas({"a": SERVE.batch}, 0.0)
    request = AdmissionRequest("r", "chat", "t", 0.0, prompt_tokens, max_tokens=100, is_stream=True)
    assert controller.submit(request, wait_s).address == "a"
    replica = controller.pool.replicas["a"]
    due_s = wait_s + replica.running["r"].predicted_ttft_s
    assert 4.0 < due_s < 8.0 - 2 * SILENT_S, "its report is at 8 s"
    assert replica.silence_s(8.0) == 0.0
    assert replica.silence_s(8.1) == pytest.approx(8.1 - due_s)
