"""The engine container: which image, which arguments, which environment.

The launcher sets some flags and variables itself (ports, KV transfer, drain). A user's value for one of them would
either be ignored or break the contract between engine and gateway, so it is refused by name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from plimsoll.api.contract import contract
from plimsoll.api.v1alpha1.base import Keyed, Model, Rule, Rules, matching, refusing
from plimsoll.api.v1alpha1.pod import ObjectName
from plimsoll.api.v1alpha1.scalars import DURATION_LENGTH, duration
from plimsoll.core import units


def _flag_pattern(flags: tuple[str, ...]) -> str:
    """Matches these flags as vLLM reads them: `-` or `_` between words, `=value`, `.key` of a JSON value."""
    names = "|".join(flag.removeprefix("--").replace("-", "[-_]") for flag in flags)
    return f"^--({names})([=. ]|$)"


DRAIN = units.format_duration(contract().drain["shutdown_timeout_seconds"])
_RESERVED_ARG = refusing(
    _flag_pattern(contract().reserved_args),
    f"is set by Plimsoll ({', '.join(contract().reserved_args)} are reserved)",
)
_ONE_WORD = refusing(
    "^--?[A-Za-z0-9._-]+ ",
    "has a flag and its value in one item: write two items, or --flag=value",
)


class KeyRef(Model):
    """A key of a Secret or a ConfigMap in the service's namespace."""

    name: ObjectName = Field(description="Name of the object.")
    key: Annotated[
        str,
        Field(min_length=1, max_length=253),
        Rules(matching("^[-._a-zA-Z0-9]+$", "must be a key: letters, digits, '-', '_' and '.'")),
    ] = Field(description="Key in the object.")
    optional: bool = Field(default=False, description="Whether the engine starts without it.")


class EnvSource(Model):
    """Where a variable's value comes from: exactly one of the fields."""

    secret_key_ref: KeyRef | None = Field(default=None, description="Key of a Secret.")
    config_map_key_ref: KeyRef | None = Field(default=None, description="Key of a ConfigMap.")

    rules: ClassVar[tuple[Rule[EnvSource], ...]] = (
        Rule(
            "has(self.secretKeyRef) != has(self.configMapKeyRef)",
            "needs exactly one of secretKeyRef and configMapKeyRef",
            lambda own: (own.secret_key_ref is None) != (own.config_map_key_ref is None),
        ),
    )


class EnvVar(Model):
    """An environment variable of the engine container."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=253),
        Rules(
            matching("^[-._a-zA-Z][-._a-zA-Z0-9]*$", "must be a variable's name: letters, digits, '_', '-' and '.'"),
            refusing("^PLIMSOLL_", "is reserved: names that begin with PLIMSOLL_ are set by Plimsoll"),
        ),
    ] = Field(description="Name of the variable.")
    value: str | None = Field(default=None, max_length=32768, description="Its value.")
    value_from: EnvSource | None = Field(default=None, description="Where its value comes from.")

    rules: ClassVar[tuple[Rule[EnvVar], ...]] = (
        Rule(
            "has(self.value) != has(self.valueFrom)",
            "needs exactly one of value and valueFrom",
            lambda own: (own.value is None) != (own.value_from is None),
        ),
    )


class Engine(Model):
    """The engine that serves the model; absent fields have defaults of the chart."""

    runtime: Literal["vllm", "simulated"] = Field(
        default="vllm",
        description="vllm: the engine. simulated: a stand-in that answers at an engine's pace, with words that mean "
        "nothing, to try a fleet without GPUs: it asks for none, and loads and mounts no weights.",
    )
    image: (
        Annotated[
            str,
            Field(min_length=1, max_length=512),
            Rules(
                matching(
                    "^[a-zA-Z0-9][a-zA-Z0-9._:/-]*(@sha256:[0-9a-f]{64})?$",
                    "must be an image reference, such as registry.example.com/team/engine:1.0",
                )
            ),
        ]
        | None
    ) = Field(default=None, description="Engine image, made from the bundled one; absent: the chart's for the runtime.")
    version: (
        Annotated[
            str,
            Field(min_length=1, max_length=128),
            Rules(matching("^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "must be an image tag: letters, digits, '_', '.' and '-'")),
        ]
        | None
    ) = Field(default=None, description="Another tag of the chart's engine image for the runtime.")
    args: tuple[Annotated[str, Field(min_length=1, max_length=4096), Rules(_RESERVED_ARG, _ONE_WORD)], ...] = Field(
        default=(),
        max_length=128,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Arguments of `vllm serve`; they win over the role's and the chart's defaults.",
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128, strict=False), Keyed()] = Field(
        default=(), description="Environment variables; they win over the chart's defaults."
    )
    drain_timeout: (
        Annotated[
            str,
            Field(max_length=DURATION_LENGTH),
            duration("5s", "24h", "must be from 5 seconds to 24 hours"),
            Rules(refusing("[mun]s|[.]", "must be in whole seconds, such as 90s or 1h30m")),
        ]
        | None
    ) = Field(
        default=None,
        description="The longest that an engine which is to go may take for the answers it has begun; what is not done "
        f"then is cut off and told as the Event DrainTimedOut: 5s to 24h; absent: {DRAIN}.",
    )

    rules: ClassVar[tuple[Rule[Engine], ...]] = (
        Rule(
            "!has(self.image) || !has(self.version)",
            "image and version exclude each other: put the tag into image, or leave image out",
            lambda own: own.image is None or own.version is None,
            field=".version",
            reason="FieldValueForbidden",
        ),
    )

    @property
    def drain_seconds(self) -> int:
        """How long an engine may take for the answers it has begun, once it is to go."""
        return round(units.parse_duration(self.drain_timeout or DRAIN))

    @property
    def simulated(self) -> bool:
        """Whether nothing is loaded and no GPU is used."""
        return self.runtime == "simulated"
