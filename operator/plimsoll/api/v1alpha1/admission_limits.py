"""The InferenceServiceAdmission object: what gateways read of one service, its admission limits and its engines."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from plimsoll.api.v1alpha1.tier_status import StatusModel


class InferenceServiceAdmission(StatusModel):
    """What gateways need of the InferenceService with the same name. The operator writes it, and gateways read it.

    It exists while the service takes requests. The operator makes it again if it is deleted; gateways keep what they
    have read.
    """

    limits: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
        description="The admission limits, in the format that `version` names; absent without an SLO. Internal, not an"
        " interface.",
    )
    engines: dict[str, Any] | None = Field(
        default=None,
        # atomic: else the managed fields of thousands of engines are as large as the engines
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True, "x-kubernetes-map-type": "atomic"},
        description="What EndpointSlices do not say of the engines, in the format that `version` names. Internal, not"
        " an interface.",
    )
