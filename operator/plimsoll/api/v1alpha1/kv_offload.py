"""`spec.kvOffload`: CPU memory in which an engine keeps KV blocks that its GPUs have no room for."""

from __future__ import annotations

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel
from plimsoll.api.v1alpha1.pod_overrides import SizeLimit
from plimsoll.core import units


class KvOffloadSpec(ApiModel):
    """KV cache in CPU memory, by vLLM's own connector."""

    memory: SizeLimit = Field(
        description="Size per pod, such as 64Gi. Memory request, memory limit and /dev/shm grow by it."
    )

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return int(units.parse_quantity(self.memory))
