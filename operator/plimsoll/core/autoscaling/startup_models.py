"""Start-up models of one tier, one per variant (model, image, GPUs).

Problem: start-up times depend on image, model and GPU, so one model for all variants is wrong for each. A rollback must
not lose its measurements.

Idea: each start counts for the variant of its pod. A new variant starts with the medians of the last variant of the
same model and the uncertainty of a prior, because most changes are small and one start outweighs the prior
(`startup_time`). Another model starts from the default prior. The most recently used variants are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

from plimsoll.core import codec
from plimsoll.core.autoscaling.startup_time import StartupModel, priors, record, record_restart
from plimsoll.core.codec import Length

MAX_VARIANTS: Final = 4
MAX_NAME_CHARACTERS: Final = 1024  # per part of a variant
_Name: TypeAlias = Annotated[str, Length(0, MAX_NAME_CHARACTERS)]


class Variant(NamedTuple):
    """Configuration of a replica: model with revision, engine image, GPUs and node selection. Empty: unknown."""

    model: _Name = ""
    image: _Name = ""
    gpus: _Name = ""

    @property
    def label(self) -> str:
        """Display text; empty if unknown."""
        return ", ".join(filter(None, self))


UNKNOWN_VARIANT: Final = Variant()


@codec.stored_as("start-up models", version=2, omit=("default",), by_variant="variants")
class StartupModels(NamedTuple):
    """Models by variant, least recently used first. default: model of an unknown variant. current: that of new pods."""

    default: StartupModel
    by_variant: Annotated[tuple[tuple[Variant, StartupModel], ...], Length(0, MAX_VARIANTS)] = ()
    current: Variant = UNKNOWN_VARIANT

    @property
    def current_model(self) -> StartupModel:
        """Model of the current variant."""
        return self.model_for(self.current)

    @property
    def has_startups(self) -> bool:
        """Whether a start was measured for the current variant or another one of its model."""
        return any(model.total.startups and name.model == self.current.model for name, model in self.by_variant)

    def model_for(self, variant: Variant) -> StartupModel:
        """Return the model of a variant, or a prior if it is unknown."""
        for name, model in self.by_variant:
            if name == variant:
                return model
        same_model = [model for name, model in self.by_variant if name.model == variant.model]
        return _untrained(same_model[-1]) if same_model else self.default


def select_variant(models: StartupModels, variant: Variant) -> StartupModels:
    """Return the models with another current variant. The first known variant takes over data without a variant."""
    if variant in (models.current, UNKNOWN_VARIANT):
        return models
    if models.current == UNKNOWN_VARIANT:
        renamed = [(variant if name == UNKNOWN_VARIANT else name, model) for name, model in models.by_variant]
        by_variant = (
            renamed
            if len(dict(renamed)) == len(renamed)
            else [entry for entry in models.by_variant if entry[0] != UNKNOWN_VARIANT]
        )
        models = models._replace(by_variant=tuple(by_variant))
    return _touch(models._replace(current=variant), variant, models.model_for(variant))


def record_startup(
    models: StartupModels, variant: Variant, durations_s: Sequence[tuple[str, float]], is_restart: bool = False
) -> StartupModels:
    """Return the models after a pod became ready. An unknown variant counts as the current one. Raises as `record`.

    is_restart: whether its engine had restarted in the pod.
    """
    variant = models.current if variant == UNKNOWN_VARIANT else variant
    update = record_restart if is_restart else record
    return _touch(models, variant, update(models.model_for(variant), durations_s))


def _touch(models: StartupModels, variant: Variant, model: StartupModel) -> StartupModels:
    """Return the models with this one as the last used; the oldest beyond the limit is dropped, except `current`."""
    others = [entry for entry in models.by_variant if entry[0] != variant]
    while len(others) >= MAX_VARIANTS:
        others.remove(next(entry for entry in others if entry[0] != models.current))
    return models._replace(by_variant=(*others, (variant, model)))


def _untrained(model: StartupModel) -> StartupModel:
    """Return a model without starts, with the medians of another as prior."""
    restart = (model.restart_phases, model.restart_total)
    if model.restart_total is not None:
        restart = priors(model.restart_phases, model.restart_total)
    return StartupModel(*priors(model.phases, model.total), *restart)


def decode_models(stored: object, default: StartupModel) -> StartupModels:
    """Return the models of a stored document, also of version 1. Raises ValueError if it is invalid."""
    if isinstance(stored, Mapping) and stored.get("version") == 1:  # a single model
        return StartupModels(default, ((UNKNOWN_VARIANT, codec.decode(StartupModel, stored)),))
    return codec.decode(StartupModels, stored, default=default)
