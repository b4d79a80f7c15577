"""Light engines that are not what the model predicts, and the smallest constant fleet of them that keeps the SLO.

Engines announce an 8B on an L4, so that a service starts with the prior of the data sheet. Their true steps are that
prior times a factor, and their host adds time to each first token. Both are in a hardware profile from a ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from e2e.lib.kube import Object
from e2e.lib.request_log import RequestRecord
from e2e.lib.service import make_manifest
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.engine_model import roofline
from plimsoll.core.planning.known_models import KNOWN_CONFIGS
from plimsoll.core.types import Role
from plimsoll.sim import profile, startup
from plimsoll.sim.attempt import Attempt, TraceRequest
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.result import RunResult
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator

MODEL: Final = KNOWN_CONFIGS["Llama-3.1-8B"]
GPU: Final = roofline.ACCELERATORS["L4"]
DRIVER_NAME: Final = "NVIDIA L4"
FOLDER: Final = "/models/announced"
START_S: Final = 2  # and ten seconds of warm-up
FRONTEND_S: Final = 0.003  # of the way to the engine core, which the model knows
MEMORY_SHARE: Final = 0.9
TPOT_S, SLO_SHARE = 0.25, 0.95
MAX_REPLICAS: Final = 7


@dataclass(frozen=True)
class MismatchedEngines:
    """What engines do. scale: of every step, over the prior's. host_s: what the host adds to each first token.

    rate: of the load, requests/s. ttft_s: the target.
    """

    name: str
    rate: float
    ttft_s: float
    scale: float = 1.0
    host_s: float = 0.0

    @property
    def profile(self) -> Object:
        """The engine's profile without `scale`: the prior's coefficients and the host's time."""
        shape = roofline.model_shape(MODEL)
        prior = roofline.prior(shape, GPU)
        kv_bytes = int(shape.kv_bytes_per_token)
        return {
            "accelerator": DRIVER_NAME,
            "base": prior.base_s,
            "anypre": prior.any_prefill_s,
            "pretok": prior.prefill_token_s,
            "preattn": prior.prefill_pair_s,
            "dec": prior.sequence_s,
            "ctx": prior.cached_token_s,
            "kv_tokens": int(MEMORY_SHARE * GPU.memory_bytes - shape.memory_bytes) // kv_bytes,
            "kv_bytes_per_token": kv_bytes,
            "layers": shape.layers,
            "budget": 2048,
            "max_model_len": 8192,
            "frontend": FRONTEND_S + self.host_s,
        }

    def objects(self) -> list[Object]:
        """The InferenceService, and the ConfigMap with what its engines announce and are."""
        files = {"config.json": json.dumps(dict(MODEL)), "profile.json": json.dumps(self.profile)}
        mounted = {
            "volumes": [{"name": "announced", "configMap": {"name": self.name}}],
            "volumeMounts": [{"name": "announced", "mountPath": FOLDER}],
        }
        flags: Object = {"profile": f"{FOLDER}/profile.json", "profile-scale": self.scale, "spread": 0}
        args = [f"--{flag}={value}" for flag, value in (flags | {"start-seconds": START_S}).items()]
        service = make_manifest(
            self.name,
            {"serve": {"minReplicas": 1, "maxReplicas": MAX_REPLICAS, "gpus": 0, "pod": mounted}},
            model={"uri": f"file://{FOLDER}"},
            engine={"runtime": "simulated", "args": args},
            slo={
                "percentile": round(100 * SLO_SHARE),
                "ttft": f"{1e3 * self.ttft_s:g}ms",
                "tpot": f"{1e3 * TPOT_S:g}ms",
            },
        )
        config: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": self.name}, "data": files}
        return [config, service]

    def constant_fleet_share(self, requests: Sequence[TraceRequest], replicas: int) -> float:
        """The share of the requests within the SLO on so many engines, without admission control, in virtual time."""
        service = parse({**self.objects()[1], "metadata": {"name": self.name, "namespace": "default"}})
        plant = Plant(profile.parse(self.profile), startup.parse(str(START_S)), scale=self.scale, spread=0.0)
        slo = None if service.spec.slo is None else service.spec.slo.to_core()
        bounds = {Role(name): tier.replica_bounds for name, tier in service.spec.tiers.items()}
        fleet: Any = registry.parse(
            f"static:{replicas}", PolicyContext(bounds, plant, slo, {Role.SERVE: 1}, list(requests))
        )
        initial, end_s = {Role.SERVE: replicas}, requests[-1].at_s
        result, within = RunResult(plant, initial, slo), []

        def take(attempt: Attempt) -> None:
            result.add(attempt)
            within.append(result.is_within_slo(attempt))

        Simulator(service, plant, fleet, RunConfig(initial, end_s), take).run([replace(one) for one in requests])
        return sum(within) / len(requests)

    def smallest_fleet(self, requests: Sequence[TraceRequest]) -> int:
        """The fewest engines that keep the SLO for these requests."""
        return next(n for n in range(1, MAX_REPLICAS) if self.constant_fleet_share(requests, n) >= SLO_SHARE)

    def is_within_slo(self, record: RequestRecord) -> bool:
        """Whether the promise to this request was kept, by the client's times."""
        on_time = record.ttft_s is not None and record.ttft_s <= self.ttft_s
        return record.ok and on_time and (record.tpot_s is None or record.tpot_s <= TPOT_S)
