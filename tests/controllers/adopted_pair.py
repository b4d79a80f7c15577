"""A prefill/decode pair that exists: two Deployments with pods of their own, whose router sends nothing to gateways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll.adapters.kube_client import HORIZONTALPODAUTOSCALERS, PODS, Resource
from plimsoll.core.errors import NotFound
from plimsoll.core.ports import BucketCounts
from plimsoll.core.types import Role
from tests.api.manifests import adopted_pair
from tests.controllers.adopted_fleet import KEY, AdoptedFleet
from tests.controllers.test_autoscale import INFINITE, NOW_S, engine

Object = dict[str, Any]
ROLES = ("prefill", "decode")


class AdoptedPair(AdoptedFleet):
    """Deployments `llm-prefill` and `llm-decode`. counts: their replicas; rate: requests per second of the pair;
    skipping: those that reach decode engines alone, per second."""

    def __init__(self, rate: float = 0.0, **edits: Any) -> None:
        self.counts = dict.fromkeys(ROLES, 1)
        self.role_managers = {role: [{"manager": "kubectl", "operation": "Update"}] for role in ROLES}
        self.selectors = {role: f"app=llm,role={role}" for role in ROLES}
        self.reporting: tuple[str, ...] = ROLES  # roles whose engines answer
        self.role_writes: list[tuple[str, int]] = []
        self.skipping = self._skipped = 0.0
        targets = adopted_pair(**{f"spec.targets.{role}.maxReplicas": 9 for role in ROLES})["spec"]["targets"]
        super().__init__(rate, **{"spec.targets": targets, **edits})

    def recommended(self, role: str) -> int:
        """The replicas that the last decision recommends for a role."""
        tier = self.status["tiers"][role]
        return int(tier.get("needed") or tier["summary"].partition("/")[2])

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        if not name.startswith("llm-") or name == KEY[1]:
            return await super().get(resource, namespace, name)
        if (role := name.removeprefix("llm-")) not in self.counts:
            raise NotFound(name, 404)
        fields = [{**one, "fieldsV1": {"f:spec": {"f:replicas": {}}}} for one in self.role_managers[role]]
        meta = {
            "namespace": namespace, "name": name, "uid": f"uid-{name}", "resourceVersion": str(self._version),
            "managedFields": fields,
        }  # fmt: skip
        spec = {**self.spec, "replicas": self.counts[role]}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}

    async def get_scale(self, resource: Resource, namespace: str, name: str) -> Object:
        role = name.removeprefix("llm-")
        status = {"replicas": self.counts[role], "selector": self.selectors[role]}
        return {"kind": "Scale", "metadata": {}, "spec": {"replicas": self.counts[role]}, "status": status}

    async def list(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> tuple[list[Object], str]:
        if resource is HORIZONTALPODAUTOSCALERS:
            return self.autoscalers, "1"
        assert resource is PODS
        role = next(role for role in ROLES if f"role={role}" in str(selector))
        return [self._pod_of(role, number) for number in range(self.counts[role])], "1"

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        role = name.removeprefix("llm-")
        self.role_writes.append((role, replicas))
        self.set_count(role, replicas, manager, "Apply")

    def set_count(self, role: str, replicas: int, manager: str, operation: str = "Update") -> None:
        """Somebody sets a count, and owns the field alone."""
        self._version += 1
        self.counts[role], self.role_managers[role] = replicas, [{"manager": manager, "operation": operation}]

    def _pod_of(self, role: str, number: int) -> Object:
        pod = self._pod(number)
        name = f"llm-{role}-{number}"
        return {**pod, "metadata": {**pod["metadata"], "name": name, "uid": f"uid-{name}"}}

    def _report_engines(self) -> None:
        """A prefill engine generates one token of each request, and reports no time per output token."""
        for role in self.reporting:
            for number in range(self.counts[role]):
                name = f"llm-{role}-{number}"
                rate = self.rate + (self.skipping if role == Role.DECODE else 0.0)
                count = self._counts[name] = self._counts.get(name, 0.0) + rate / self.counts[role]
                if int(self.now_s - NOW_S) % 2 == 0:
                    ttft = BucketCounts((0.1, 1.0, INFINITE), (0.0, count, 0.0), 0.3 * count)
                    counted = replace(
                        engine(count, self.now_s), pod=name, ttft_s=ttft, steps=None, computed_tokens=None
                    )
                    if role == Role.PREFILL:
                        counted = replace(counted, tpot_s=None, itl_s=None, generated_tokens=count)
                    else:
                        skipped = self._skipped = self._skipped + 2.0 * self.skipping / self.counts[role]
                        counted = replace(counted, local_prompt_tokens=500.0 * skipped)
                    running = 4.0 if rate else 0.0
                    self.scaler.observe_engine(KEY, Role(role), replace(counted, running=running))
