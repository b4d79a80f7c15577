"""An admission controller for one engine model, and requests to it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200
LARGE = StepModel(0.0132, 0.0, 5.2e-5, 1.75e-9, 2.0e-5, 4.6e-8)  # a 32B on two H100s
ROOMY = EngineLimits(1024, 919_824, 8192)
SLO = Slo(0.95, 0.5, 0.0, 0.05)
SLOW = (1.10, 1.0, 1.15, 1.10, 1.20, 0.90)


def chat(rows: int = 2000) -> Workload:
    rng = np.random.default_rng(1)
    prompts = np.ceil(1000 * np.exp(0.6 * rng.standard_normal(rows)))
    outputs = np.ceil(195 * np.exp(0.5 * rng.standard_normal(rows)))
    return from_samples(prompts, np.zeros(rows), outputs)


CHAT = chat()
FIXED = from_samples([4000.0], [0.0], [1000.0])
SERVE = TierSpec(Role.SERVE, HOT, CHAT, ROOMY, SLO)
GUIDE = TierSpec(Role.SERVE, LARGE, FIXED, EngineLimits(1024, 330_000, 8192), Slo(0.95, 3.0, 0.0, 0.1))
ONE_CLASS = (ClassPolicy("chat", 0, SLO),)


def scaled(model: StepModel, by: tuple[float, ...]) -> StepModel:
    names = ("base_s", "any_prefill_s", "prefill_token_s", "prefill_pair_s", "sequence_s", "cached_token_s")
    return StepModel(*(getattr(model, name) * factor for name, factor in zip(names, by, strict=True)))


def gate(
    tier: TierSpec = SERVE,
    classes: tuple[ClassPolicy, ...] = ONE_CLASS,
    replicas: int = 1,
    announcement: CapacityAnnouncement = CapacityAnnouncement(),  # noqa: B008 - a value
    tenants: Mapping[str, TenantPolicy] | None = None,
) -> AdmissionController:
    made = AdmissionController(classes, engine_cost_model(tier, classes), tenants or {})
    made.tick(0.0, announcement)
    if replicas:
        made.set_replicas({str(k): made.pool.cost_model.batch for k in range(replicas)}, 0.0)
    return made


def make_request(id: str, now: float = 0.0, **other: object) -> AdmissionRequest:
    return AdmissionRequest(
        **({"id": id, "request_class": "chat", "tenant": "t", "arrived_s": now, "prompt_tokens": 1000} | other)
    )  # type: ignore[arg-type]


def fill(controller: AdmissionController, now: float = 0.0, step_s: float = 0.04, **other: object) -> tuple[int, float]:
    """Offers requests, one every step_s, until one is not let in; returns how many were, and the time."""
    for count in range(5000):
        decision = controller.submit(make_request(f"fill{count}", now, **other), now)
        if decision.outcome is not AdmissionOutcome.ADMITTED:
            controller.cancel(f"fill{count}", now)
            return count, now
        now += step_s
    raise AssertionError("it never fills")


def outcomes(decisions: list[AdmissionDecision]) -> list[AdmissionOutcome]:
    return [decision.outcome for decision in decisions]
