"""`spec.adapters` and `spec.engine.lora`: LoRA adapters of the model, and how many of them an engine holds.

An adapter has a model name of its own. Engines of the service load it while they run. `spec.engine.lora` has what an
engine fixes at its start, so a change of it restarts engines.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, ValidationRule, ValidationRules, with_values
from plimsoll.api.v1alpha1.model import (
    ADAPTER_URI_RULES,
    MODEL_NAME_RULE,
    REVISION_RULE,
    claim_of,
    location_of,
    scheme_of,
)
from plimsoll.core.routing.model_names import MAX_ADAPTERS
from plimsoll.engines.desired_adapters import Adapter

LoraRank = Literal[8, 16, 32, 64, 128, 256, 320, 512]
DEFAULT_MAX_LORAS: Final = 8
DEFAULT_MAX_LORA_RANK: Final = 16
DEFAULT_MAX_CPU_LORAS: Final = MAX_ADAPTERS
# Characters of all names, URIs and revisions: spec and status of 256 adapters then fit what the operator reads of an
# object (`adapters.object_size`). It is 128 characters for each of them.
MAX_ADAPTERS_CHARS: Final = 32_768
_LORAS: Final = f"(has(self.maxLoras) ? self.maxLoras : {DEFAULT_MAX_LORAS})"
_CPU_LORAS: Final = f"(has(self.maxCpuLoras) ? self.maxCpuLoras : {DEFAULT_MAX_CPU_LORAS})"


class LoraSpec(ApiModel):
    """Bounds on LoRA adapters in one engine."""

    max_loras: int | None = Field(
        default=None,
        ge=1,
        le=MAX_ADAPTERS,
        json_schema_extra={"format": "int32"},
        description="Adapters that one batch may use, which is how many are in GPU memory (`--max-loras`). "
        f"Absent: {DEFAULT_MAX_LORAS}.",
    )
    max_lora_rank: LoraRank | None = Field(
        default=None,
        json_schema_extra={"format": "int32"},
        description="Highest rank of an adapter (`--max-lora-rank`). GPU memory grows with it. "
        f"Absent: {DEFAULT_MAX_LORA_RANK}.",
    )
    max_cpu_loras: int | None = Field(
        default=None,
        ge=1,
        le=MAX_ADAPTERS,
        json_schema_extra={"format": "int32"},
        description="Adapters that an engine holds in CPU memory (`--max-cpu-loras`), and so the highest number of "
        f"adapters of the service. Absent: {DEFAULT_MAX_CPU_LORAS}.",
    )

    rules: ClassVar[tuple[ValidationRule[LoraSpec], ...]] = (
        ValidationRule(
            f"{_LORAS} <= {_CPU_LORAS}",
            f"maxCpuLoras must be at least maxLoras ({DEFAULT_MAX_LORAS} if absent): raise it, or lower maxLoras",
            lambda own: own.loras <= own.cpu_loras,
            field=".maxCpuLoras",
            **with_values(
                "maxCpuLoras ",
                (_CPU_LORAS, lambda own: own.cpu_loras),
                " must be at least maxLoras ",
                (_LORAS, lambda own: own.loras),
                ": raise maxCpuLoras, or lower maxLoras",
            ),
        ),
    )

    @property
    def loras(self) -> int:
        """Adapters in GPU memory."""
        return self.max_loras or DEFAULT_MAX_LORAS

    @property
    def lora_rank(self) -> int:
        """Highest rank of an adapter."""
        return self.max_lora_rank or DEFAULT_MAX_LORA_RANK

    @property
    def cpu_loras(self) -> int:
        """Adapters in CPU memory."""
        return self.max_cpu_loras or DEFAULT_MAX_CPU_LORAS


class AdapterSpec(ApiModel):
    """A LoRA adapter of the model, which clients reach by its own model name."""

    name: Annotated[str, Field(min_length=1, max_length=128), ValidationRules(MODEL_NAME_RULE)] = Field(
        description="Name that clients send as `model`. It belongs to the first service or adapter that uses it. "
        "NAMESPACE/SERVICE/NAME works too."
    )
    uri: Annotated[str, Field(min_length=1, max_length=1024), ValidationRules(*ADAPTER_URI_RULES)] = Field(
        description="Location of the adapter: hf://, pvc:// or file://, as in `model.uri`. A new claim restarts "
        "engines."
    )
    revision: Annotated[str, Field(min_length=1, max_length=253), ValidationRules(REVISION_RULE)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// repository. Absent: the main branch."
    )
    pinned: bool = Field(
        default=False,
        description="Whether a starting engine loads the adapter before it is ready. Others are loaded right after.",
    )

    rules: ClassVar[tuple[ValidationRule[AdapterSpec], ...]] = (
        ValidationRule(
            "!has(self.revision) || self.uri.startsWith('hf://')",
            "revision is allowed only for hf:// adapters",
            lambda own: own.revision is None or scheme_of(own.uri) == "hf",
            field=".revision",
            reason="FieldValueForbidden",
        ),
    )

    @property
    def claim(self) -> str | None:
        """The claim of a pvc:// adapter; None for other schemes."""
        found = claim_of(self.uri)
        return None if found is None else found[0]

    @property
    def chars(self) -> int:
        """Characters that count for MAX_ADAPTERS_CHARS."""
        return len(self.name) + len(self.uri) + len(self.revision or "")

    @property
    def desired(self) -> Adapter:
        """The adapter as the launcher reads it."""
        return Adapter(self.name, scheme_of(self.uri), location_of(self.uri), self.revision or "", self.pinned)
