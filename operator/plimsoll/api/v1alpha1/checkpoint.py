"""The InferenceServiceCheckpoint object: what the operator has learned about one service, for its next process."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from plimsoll.api.v1alpha1.tier_status import StatusModel

MAX_STATE_CHARS: Final = 65_536


class LearnedState(StatusModel):
    """The state and the time it was made."""

    time: str = Field(json_schema_extra={"format": "date-time"}, description="Time at which the state was written.")
    zlib: str = Field(
        max_length=MAX_STATE_CHARS,
        description="Calibration, start-up times and forecast of the service: JSON, compressed with zlib, in base64. "
        "Internal, not an interface.",
    )


class InferenceServiceCheckpoint(StatusModel):
    """Learned state of the InferenceService with the same name. Only the operator reads and writes it.

    An operator that starts without it learns again. Deleting it is safe.
    """

    state: LearnedState = Field(description="The learned state.")
