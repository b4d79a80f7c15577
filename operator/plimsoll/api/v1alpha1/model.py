"""`spec.model`: the location of the weights and the model name that clients send.

The scheme of the URI names the kind of location. Validation rejects planned schemes by name, and each supported scheme
has its own message for an invalid form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, ValidationRule, ValidationRules, matching
from plimsoll.api.v1alpha1.pod_overrides import ObjectName, SizeLimit

SCHEMES: Final = ("hf", "pvc", "file")
PLANNED_SCHEMES: Final = ("s3", "gs", "oci")
DEFAULT_CACHE_SIZE: Final = "64Gi"

_SCHEME_HINT = "use hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH"
_SEGMENT = "[A-Za-z0-9_][A-Za-z0-9._-]*"


def scheme_of(uri: str) -> str:
    """The scheme of a URI, "" without one."""
    return uri.split("://")[0] if "://" in uri else ""


def location_of(uri: str) -> str:
    """The URI after the scheme: `ORG/REPO`, `CLAIM/PATH` or `/PATH`, without a trailing slash."""
    return uri.split("://", 1)[1].rstrip("/")


def claim_of(uri: str) -> tuple[str, str] | None:
    """Claim name and path of a pvc:// URI; None for other schemes."""
    claim, _, path = location_of(uri).partition("/")
    return (claim, path) if scheme_of(uri) == "pvc" else None


def _scheme_rule(scheme: str, pattern: str, message: str) -> ValidationRule[str]:
    """Return a rule that applies only to URIs of one scheme."""
    rule = matching(pattern, message)
    return ValidationRule(
        f"!self.startsWith('{scheme}://') || {rule.cel}",
        message,
        lambda uri: scheme_of(uri) != scheme or rule.holds is None or rule.holds(uri),
    )


def _unknown_scheme_message(uri: str) -> str:
    scheme = scheme_of(uri)
    return f"has unknown scheme {scheme}://; {_SCHEME_HINT}" if scheme else f"has no scheme; {_SCHEME_HINT}"


URI_RULES = (
    ValidationRule[str](
        f"!self.matches('^({'|'.join(PLANNED_SCHEMES)})://')",
        f"has a scheme that is not supported yet; {_SCHEME_HINT}",
        lambda uri: scheme_of(uri) not in PLANNED_SCHEMES,
        message_cel=f"'has scheme ' + self.split('://')[0] + '://, which is not supported yet; {_SCHEME_HINT}'",
        format_message=lambda uri: f"has scheme {scheme_of(uri)}://, which is not supported yet; {_SCHEME_HINT}",
    ),
    ValidationRule[str](
        f"self.matches('^({'|'.join((*SCHEMES, *PLANNED_SCHEMES))})://')",
        f"has an unknown scheme; {_SCHEME_HINT}",
        lambda uri: scheme_of(uri) in (*SCHEMES, *PLANNED_SCHEMES),
        message_cel="(self.contains('://') ? 'has unknown scheme ' + self.split('://')[0] + '://' : 'has no scheme')"
        f" + '; {_SCHEME_HINT}'",
        format_message=_unknown_scheme_message,
    ),
    _scheme_rule(
        "hf", f"^hf://{_SEGMENT}/{_SEGMENT}$", "must have exactly an organisation and a repository: hf://ORG/REPO"
    ),
    _scheme_rule(
        "pvc",
        f"^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/{_SEGMENT})+/?$",
        "must have a claim and a path in it, without '..': pvc://CLAIM/PATH",
    ),
    _scheme_rule(
        "file",
        f"^file://(/{_SEGMENT})+/?$",
        "must have an absolute path in the engine image, without '..': file:///PATH",
    ),
)

MODEL_NAME_RULE = matching(
    "^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
    "must begin with a letter or digit and have only letters, digits, '.', '_', ':', '/' and '-'",
)
REVISION_RULE = matching(
    "^[A-Za-z0-9][A-Za-z0-9._/-]*$",
    "must be a branch, a tag or a commit: letters, digits, '.', '_', '/', '-'",
)


class SecretRef(ApiModel):
    """A key of a Secret that holds a Hugging Face token."""

    name: ObjectName = Field(description="Name of a Secret in the service's namespace.")
    key: Annotated[
        str,
        Field(min_length=1, max_length=253),
        ValidationRules(matching("^[-._a-zA-Z0-9]+$", "must be a key of a Secret: letters, digits, '-', '_' and '.'")),
    ] = Field(default="token", description="Key of the Secret.")


class CacheSpec(ApiModel):
    """Storage for downloaded weights: a claim that outlives pods, or an emptyDir."""

    claim_name: ObjectName | None = Field(
        default=None,
        description="PersistentVolumeClaim mounted at HF_HOME. It must be ReadWriteMany if several pods use it.",
    )
    size_limit: SizeLimit | None = Field(
        default=None, description=f"Size limit of the emptyDir. Absent without claimName: {DEFAULT_CACHE_SIZE}."
    )

    rules: ClassVar[tuple[ValidationRule[CacheSpec], ...]] = (
        ValidationRule(
            "!has(self.claimName) || !has(self.sizeLimit)",
            "claimName and sizeLimit are mutually exclusive: a claim has its own size",
            lambda own: own.claim_name is None or own.size_limit is None,
            field=".sizeLimit",
            reason="FieldValueForbidden",
        ),
    )


def _only_hf(field: str, is_set: Callable[[ModelSource], bool]) -> ValidationRule[ModelSource]:
    return ValidationRule(
        f"!has(self.{field}) || self.uri.startsWith('hf://')",
        f"{field} is allowed only for hf:// models",
        lambda own: own.scheme == "hf" or not is_set(own),
        field=f".{field}",
        reason="FieldValueForbidden",
    )


def _without_default(schema: dict[str, Any]) -> None:
    """The default is not stored, so that `kubectl describe` stays short."""
    del schema["default"]


class ModelSource(ApiModel):
    """The model: its weights and its name."""

    uri: Annotated[str, Field(min_length=1, max_length=1024), ValidationRules(*URI_RULES)] = Field(
        description="Location of the weights: hf://ORG/REPO (Hugging Face), pvc://CLAIM/PATH (a directory in a claim "
        "of the service's namespace, mounted read-only) or file:///PATH (a directory in the engine image)."
    )
    name: (
        Annotated[
            str,
            Field(min_length=1, max_length=253),
            ValidationRules(MODEL_NAME_RULE),
        ]
        | None
    ) = Field(
        default=None,
        description="Name that clients send as `model`. Absent: the object's name. If several services use one name, "
        "it belongs to the first one as long as that one uses it. It cannot begin with NAMESPACE/ of another namespace "
        "that has services. NAMESPACE/NAME works too. A change does not restart engines.",
    )
    revision: (
        Annotated[
            str,
            Field(min_length=1, max_length=253),
            ValidationRules(REVISION_RULE),
        ]
        | None
    ) = Field(default=None, description="Branch, tag or commit of an hf:// repository. Absent: the main branch.")
    task: Literal["generate", "embed", "score", "transcribe"] = Field(
        default="generate",
        json_schema_extra=_without_default,
        description="What the model does, and so which routes it serves: generate (chat, completions, responses, "
        "messages), embed (embeddings, rerank, score), score (rerank and score of a cross-encoder) or transcribe "
        "(audio). embed and score start the engine as a pooling model. Absent: generate.",
    )
    secret_ref: SecretRef | None = Field(
        default=None, description="Hugging Face token, for gated or private repositories."
    )
    cache: CacheSpec = Field(default=CacheSpec(), description="Storage for downloaded weights.")

    rules: ClassVar[tuple[ValidationRule[ModelSource], ...]] = (
        _only_hf("revision", lambda own: own.revision is not None),
        _only_hf("secretRef", lambda own: own.secret_ref is not None),
    )

    @property
    def scheme(self) -> str:
        """hf, pvc or file."""
        return scheme_of(self.uri)

    @property
    def location(self) -> str:
        """The URI after the scheme: `ORG/REPO`, `CLAIM/PATH` or `/PATH`, without a trailing slash."""
        return location_of(self.uri)

    @property
    def claim(self) -> tuple[str, str] | None:
        """Claim name and path of a pvc:// model; None for other schemes."""
        return claim_of(self.uri)

    @property
    def cache_size(self) -> str:
        """Size limit of the cache's emptyDir as a quantity; unused with a claim."""
        return self.cache.size_limit or DEFAULT_CACHE_SIZE
