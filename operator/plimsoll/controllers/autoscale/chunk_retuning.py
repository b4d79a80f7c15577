"""Feeds `core.planning.retuning` from a service's snapshot and Deployment, once a minute. Pure."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, Final

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import tier_workload
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S
from plimsoll.core.autoscaling.retuning_state import RetuningState
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.planning import retuning
from plimsoll.core.planning.retuning import Minute
from plimsoll.core.types import Role
from plimsoll.engines import vllm
from plimsoll.resources import engine_tuning, hardware, object_meta, objects
from plimsoll.resources.engine_tuning import MeasuredChunk

Object = dict[str, Any]

SERVICES_PER_CHANGE: Final = 20  # of which one at a time may get another chunk; at least one of all


def update(
    service: InferenceService,
    service_state: ServiceState,
    snapshot: ServiceSnapshot,
    spec: ScalingSpec,
    workload: Object | None,
    now_s: float,
    *,
    has_turn: bool,
) -> str | None:
    """Update `service_state.retuning`. Returns what begins: `changed`, `undone`, or None for no rollout.

    workload: of the tier `serve`, None before it exists. has_turn: whether a change may begin; an undo always may.
    """
    state = service_state.retuning
    phase_s = float(zlib.crc32(f"{service.metadata.namespace}/{service.metadata.name}".encode()))
    if workload is None or Role.SERVE not in snapshot.tiers or not _may_change(spec):
        return None
    if not retuning.is_due(state, now_s, phase_s):
        return None
    if not engine_tuning.may_be_measured(service, tier_workload.pod_template(workload)):
        return None
    minute = replace(_minute(service, service_state, snapshot, spec, workload), has_turn=has_turn)
    new = service_state.retuning = retuning.update(state, minute, now_s, phase_s)
    if new.wanted is None or (new.wanted, new.is_undo) == (state.wanted, state.is_undo):
        return None
    return "undone" if new.is_undo else "changed"


def wanted_chunk(state: RetuningState, spec: ScalingSpec) -> MeasuredChunk | None:
    """The chunk to roll out; None for no change, and while the spec allows none."""
    if state.wanted is None or not _may_change(spec):
        return None
    return MeasuredChunk(state.revision, state.wanted, state.reason, state.changed_s)


def _may_change(spec: ScalingSpec) -> bool:
    return spec.policy.mode is ScalingMode.AUTO and not spec.policy.paused and spec.slo is not None


def _minute(
    service: InferenceService,
    service_state: ServiceState,
    snapshot: ServiceSnapshot,
    spec: ScalingSpec,
    workload: Object,
) -> Minute:
    tier, engines, pods = service_state.tiers[Role.SERVE], service.spec.tiers.serve, snapshot.tiers[Role.SERVE]
    assert engines is not None
    assert spec.slo is not None
    updated = tier_workload.updated_replicas(workload)
    is_settled = pods.is_uniform and 0 < pods.ready == pods.replicas == updated and not pods.starting
    is_settled = is_settled and tier_workload.is_observed(workload)
    gpu = hardware.named_accelerator(engines.pod.node_selector)
    return Minute(
        objects.revision_name(service, Role.SERVE.value),
        engine_tuning.measured_chunk(workload),
        is_settled,
        snapshot.metrics.arrivals / LATENCY_WINDOW_S / max(1, pods.ready),
        retuning.is_slo_met(snapshot.metrics, spec.slo, spec.slos),
        None if tier.engines.last_window is None else tier.capacity_state.tier_spec,
        1 if tier.engines.announced is None else tier.engines.announced.max_sequences,
        0 if gpu is None else vllm.default_batched_tokens(gpu.name, gpu.memory_bytes),
        object_meta.short_hash(f"{spec.slo} {spec.slos} {objects.template_generation(workload)}"),
        tier_workload.is_replaced(workload, ()),
        tier_workload.progressed_s(workload),
    )
