"""The object itself, and the one way from a manifest to it.

`parse` repeats every check of the API server, because a cluster may have an older CRD than the operator. It lists all
problems at once, each as a sentence that begins with the full path of the field at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from plimsoll.api.v1alpha1.base import Model, Rule, Rules, matching
from plimsoll.api.v1alpha1.engine import Engine
from plimsoll.api.v1alpha1.model import ModelSource
from plimsoll.api.v1alpha1.problems import sentences
from plimsoll.api.v1alpha1.slo import Slo
from plimsoll.api.v1alpha1.status import Status
from plimsoll.api.v1alpha1.tiers import Tiers
from plimsoll.core.errors import InvalidSpec

LONGEST_NAME: Final = 40

# Deployments and Services are named after the service, with the tier's role and a hash behind it.
NAME_RULES: Final = (
    Rule[str](
        f"self.size() <= {LONGEST_NAME}",
        f"must have at most {LONGEST_NAME} characters: names of Services are made from it",
        lambda name: len(name) <= LONGEST_NAME,
    ),
    matching(
        "^[a-z]([-a-z0-9]*[a-z0-9])?$",
        "must begin with a lower-case letter, end with a letter or digit, and have only lower-case letters, digits and"
        " '-': names of Services are made from it",
    ),
)


class Spec(Model):
    """What is wanted."""

    model: ModelSource = Field(description="The model: its weights and its name.")
    engine: Engine = Field(default=Engine(), description="The engine that serves the model.")
    slo: Slo | None = Field(
        default=None, description="The latency promise. Validated and shown; nothing acts on it yet."
    )
    tiers: Tiers = Field(description="The tiers: `serve` alone, or `prefill` and `decode`. The shape cannot change.")


class Meta(Model):
    """The part of ObjectMeta that Plimsoll reads."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Rules(*NAME_RULES)]
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})


class InferenceService(Model):
    """A model served within a latency promise, by tiers of engines behind one gateway."""

    api_version: Literal["plimsoll.dev/v1alpha1"] = "plimsoll.dev/v1alpha1"
    kind: Literal["InferenceService"] = "InferenceService"
    metadata: Meta
    spec: Spec = Field(description="What is wanted.")
    status: Status = Field(default=Status(), description="What was last observed.")

    @property
    def key(self) -> str:
        """NAMESPACE/NAME: unique in the cluster, and the name clients can always use."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def model_name(self) -> str:
        """The name this service claims for clients; another service may own it."""
        return self.spec.model.name or self.metadata.name


def parse(obj: Mapping[str, Any]) -> InferenceService:
    """The typed object for a manifest as the API server sends it.

    Raises InvalidSpec with every problem found. A status that this version cannot read counts as empty: it is not the
    user's. Rules that span fields of an object are judged once each of these fields is right by itself, as in the API
    server; that the shape of tiers never changes is judged by the API server alone.
    """
    try:
        return InferenceService.model_validate({**obj, "status": _status(obj.get("status"))}, by_name=False)
    except ValidationError as error:
        raise InvalidSpec(sentences(error)) from error


def _status(found: Any) -> Status:
    try:
        return Status.model_validate(found, by_name=False)
    except ValidationError:
        return Status()
