"""The simulated gateway learns first tokens while responses run, as the real one does."""

from plimsoll.core.admission.cost_model import engine_cost_model
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.gateway import SimulatedGateway
from tests.core.admission_fixtures import ONE_CLASS, SERVE
from tests.sim import sim_harness


def test_first_token_counts_at_its_report_and_once() -> None:
    gateway = SimulatedGateway("one", ONE_CLASS, {}, 10, 0.0)
    gateway.set_endpoints([Endpoint("0", "0", Role.SERVE, "1", True, routable=True)], 0.0)
    gateway.publish(AdmissionLimits(("chat",), engine_cost_model(SERVE, ONE_CLASS)), 0.0)
    assert gateway.admission is not None
    margin = gateway.admission.controller._margins[0]
    attempt = Attempt(1, TraceRequest(0.0, 100, 200), None)
    decision = gateway.submit(attempt, 0.0)
    assert decision is not None
    attempt.admitted_s, attempt.address = 0.0, decision.address or ""
    gateway.on_dispatch(attempt, True)
    assert gateway.first_token_report_s(attempt) is None
    attempt.first_token_s = 1.5
    assert gateway.first_token_report_s(attempt) == 2.0
    before = margin.margin_s
    gateway.record_first_token(attempt, 2.0)
    known = margin.margin_s
    assert known > before
    gateway.on_end(attempt, True, 5.0)
    assert margin.margin_s == known


def test_first_tokens_count_before_any_response_ends() -> None:
    requests = [TraceRequest(number / 2, 100, 6000) for number in range(60)]
    done = sim_harness.simulate(requests, end_s=32.0, tail_s=0.0)
    assert AttemptOutcome.OK not in {attempt.outcome for attempt in done.attempts}
    admission = done.world.gateways[0].admission
    assert admission is not None
    margin = admission.controller._margins[0]
    assert margin.margin_s < 0.3 * 2.0  # of the target of 2 s, as it begins
