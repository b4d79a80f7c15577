"""The InferenceServiceAdmission object: the admission limits of one service, published to the gateways."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from plimsoll.api.v1alpha1.tier_status import StatusModel


class InferenceServiceAdmission(StatusModel):
    """Admission limits of the InferenceService with the same name. The operator writes it, and gateways read it.

    It exists while the service has an SLO. The operator makes it again if it is deleted; gateways keep the last limits.
    """

    limits: dict[str, Any] = Field(
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
        description="The limits, in the format that `version` names. Internal, not an interface.",
    )
