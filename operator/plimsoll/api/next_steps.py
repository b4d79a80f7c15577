"""What a user does next at each reason of a condition, for the reference page. The message has the details."""

from __future__ import annotations

from typing import Final

from plimsoll.api.conditions import ConditionReason

NOTHING: Final = "nothing"
_WAIT: Final = "wait"
_READ_POD: Final = "follow the message; `kubectl describe pod` and `kubectl logs` have more"
_PEER: Final = "choose another name, or remove the other service"
_REACH: Final = "check that the operator can reach the pods (NetworkPolicy, mesh)"

NEXT_STEPS: dict[ConditionReason, str] = {
    ConditionReason.SERVING: NOTHING,
    ConditionReason.NO_GATEWAY: "check the gateway pods of the release",
    ConditionReason.NO_ROUTABLE_ENDPOINT: _WAIT,
    ConditionReason.PREFILL_UNAVAILABLE: "see `PrefillDegraded`, or set `whenPrefillUnavailable: Serve`",
    ConditionReason.STARTING: _WAIT,
    ConditionReason.SCALED_TO_ZERO: f"{NOTHING}, or send a request",
    ConditionReason.WAKING: _WAIT,
    ConditionReason.TRANSFER_SLOW: "give both tiers the RDMA device or block size that the message names",
    ConditionReason.UNSCHEDULABLE: "add nodes, or lower what the pods request",
    ConditionReason.IMAGE_UNAVAILABLE: "correct the image or its pull secret",
    ConditionReason.CONFIG_ERROR: "create the object that the message names",
    ConditionReason.POD_FAILED: _READ_POD,
    ConditionReason.VOLUME_UNAVAILABLE: "repair the volume, claim or Secret that the message names",
    ConditionReason.NODE_NOT_READY: "repair or remove the node",
    ConditionReason.ENGINE_FAILING: _READ_POD,
    ConditionReason.PODS_REJECTED: "raise the quota, or change the policy or the pod fields that the message names",
    ConditionReason.NAMESPACE_TERMINATING: "use another namespace",
    ConditionReason.LEADER_WORKER_SETS_UNUSABLE: "install LeaderWorkerSet v1, or grant the operator its rights",
    ConditionReason.PROGRESSING: _WAIT,
    ConditionReason.RECOVERING: _WAIT,
    ConditionReason.INVALID_SPEC: "correct the field that the message names",
    ConditionReason.APPLY_REJECTED: "correct what the message names, or grant the operator its rights",
    ConditionReason.OTHER_RELEASE: "delete the Lease if that release is gone",
    ConditionReason.MODEL_NAME_TAKEN: _PEER,
    ConditionReason.MODEL_NAME_RESERVED: "choose a name that does not begin with another namespace",
    ConditionReason.SHORT_NAMES_RESTRICTED: "use NAMESPACE/NAME, or have the namespace listed",
    ConditionReason.ADAPTER_FAILED: "correct the adapter that the message names",
    ConditionReason.ENGINES_READY: NOTHING,
    ConditionReason.ENGINES_NOT_READY: "see the pods of the target",
    ConditionReason.TARGET_NOT_FOUND: "correct `spec.targets`, or create the target",
    ConditionReason.TARGET_FORBIDDEN: "add the kind to `targets.resources`",
    ConditionReason.TARGET_NOT_SCALABLE: "name an object with `scale`, such as a Deployment",
    ConditionReason.TARGET_UNREADABLE: "wait, and check the API server if it stays",
    ConditionReason.TARGET_TAKEN: "remove the target from one of the two services",
    ConditionReason.TARGET_OVERLAPS: "remove the target from one of the two services",
    ConditionReason.REPLICAS_OWNED: "remove the other writer, or set `scaling.mode: Recommend`",
    ConditionReason.DEMAND_UNKNOWN: "see `MetricsDegraded`; without it, wait",
    ConditionReason.DECISION_FAILED: "see the operator's log, and report the error",
    ConditionReason.NO_SLO: "set `spec.slo`, or `maxReplicas` to `minReplicas`",
    ConditionReason.PAUSED: "set `scaling.paused: false` to scale",
    ConditionReason.RECOMMEND_ONLY: "set `scaling.mode: Auto` to scale",
    ConditionReason.SCALING_OFF: "set `scaling.mode: Auto` to scale",
    ConditionReason.AT_MAX_REPLICAS: "raise `maxReplicas`, or relax the SLO",
    ConditionReason.RATE_LIMITED: "wait, or raise the limit",
    ConditionReason.METRICS_DELAYED: _REACH,
    ConditionReason.METRICS_PARTIAL: f"see the pods that the message names; {_REACH}",
    ConditionReason.METRICS_MISSING: f"see the pods of gateways and engines; {_REACH}",
    ConditionReason.GATEWAYS_BYPASSED: "send requests to `status.url`",
    ConditionReason.LABELS_MATCH_NOTHING: "restore the pod labels that the message names",
    ConditionReason.INFEASIBLE: "set targets that the message names, or use other hardware",
    ConditionReason.SLO_MET: NOTHING,
    ConditionReason.SLO_VIOLATED: "see `ScalingLimited`, `Shedding` and `ModelMismatch`, then `explain`",
    ConditionReason.SLO_UNDETERMINED: NOTHING,
    ConditionReason.NOT_MEASURED: "wait for requests; `MetricsDegraded` names missing metrics",
    ConditionReason.SHEDDING: "wait for replicas that start; `ScalingLimited` names a limit to raise",
    ConditionReason.MEASURED_OTHERWISE: "follow the message, such as by a correct engine argument",
    ConditionReason.GATEWAY_CONFIG_STALE: "follow the message",
    ConditionReason.FALLBACK_UNUSABLE: "correct `admission.fallback`",
    ConditionReason.POOL_KIND_MISSING: "install the Gateway API Inference Extension",
    ConditionReason.POOL_TAKEN: "rename or remove the other pool",
    ConditionReason.POOL_REJECTED: "correct what the message names",
    ConditionReason.POOL_NOT_ACCEPTED: "see the status of the InferencePool",
    ConditionReason.ROLLING_OUT: _WAIT,
    ConditionReason.ROLLOUT_WAITING: "wait, or remove the obstacle that the message names",
    ConditionReason.ROLLOUT_PAUSED: "set `engine.rollout.paused: false` to go on",
    ConditionReason.ROLLOUT_STOPPED: "repair the named service, or undo the rollout",
    ConditionReason.ROLLOUT_FAILED: "repair the service; `explain` and its conditions have the cause",
    ConditionReason.OPERATOR_ERROR: "see the operator's log, and report the error",
}
