"""`spec.model`: the location of the weights and the model name that clients send.

The scheme of the URI names the kind of location. Each scheme has its own message for an invalid form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, ValidationRule, ValidationRules, matching
from plimsoll.api.v1alpha1.pod_overrides import ObjectName, SizeLimit

SCHEMES: Final = ("hf", "pvc", "file", "s3", "gs", "https", "oci")
FETCHED_SCHEMES: Final = ("s3", "gs", "https")  # the launcher downloads them into the cache
_CACHED_SCHEMES: Final = ("hf", *FETCHED_SCHEMES)
ADAPTER_SCHEMES: Final = ("hf", "pvc", "file")
DEFAULT_CACHE_SIZE: Final = "64Gi"

_ADAPTER_HINT: Final = "use hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH"
_SCHEME_HINT: Final = (
    "use hf://ORG/REPO, pvc://CLAIM/PATH, file:///PATH, s3://BUCKET/PATH, gs://BUCKET/PATH, https://HOST/PATH.tar or "
    "oci://REGISTRY/REPOSITORY:TAG"
)
_SEGMENT = "[A-Za-z0-9_][A-Za-z0-9._-]*"


def scheme_of(uri: str) -> str:
    """The scheme of a URI, "" without one."""
    return uri.split("://")[0] if "://" in uri else ""


def location_of(uri: str) -> str:
    """The URI after the scheme, such as `ORG/REPO`, `CLAIM/PATH` or `/PATH`, without a trailing slash."""
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


def _scheme_rules(schemes: tuple[str, ...], hint: str) -> tuple[ValidationRule[str], ...]:
    """Return the rule that a URI has one of the schemes; its message gives the hint."""

    def message(uri: str) -> str:
        return f"has unknown scheme {scheme_of(uri)}://; {hint}" if scheme_of(uri) else f"has no scheme; {hint}"

    return (
        ValidationRule[str](
            f"self.matches('^({'|'.join(schemes)})://')",
            f"has an unknown scheme; {hint}",
            lambda uri: scheme_of(uri) in schemes,
            message_cel="(self.contains('://') ? 'has unknown scheme ' + self.split('://')[0] + '://' : "
            f"'has no scheme') + '; {hint}'",
            format_message=message,
        ),
    )


_MOUNTED_RULES: Final = (
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
ADAPTER_URI_RULES: Final = (*_scheme_rules(ADAPTER_SCHEMES, _ADAPTER_HINT), *_MOUNTED_RULES)
URI_RULES: Final = (
    *_scheme_rules(SCHEMES, _SCHEME_HINT),
    *_MOUNTED_RULES,
    *(
        _scheme_rule(
            scheme,
            f"^{scheme}://[a-z0-9][a-z0-9._-]*[a-z0-9](/{_SEGMENT})*/?$",
            f"must have a bucket and a folder in it, without '..': {scheme}://BUCKET/PATH",
        )
        for scheme in ("s3", "gs")
    ),
    _scheme_rule(
        "https",
        f"^https://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/{_SEGMENT})*[.](tar|tar[.]gz|tgz)$",
        "must be an archive, without user and query: https://HOST/PATH.tar, .tar.gz or .tgz",
    ),
    _scheme_rule(
        "oci",
        "^oci://[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+(:[A-Za-z0-9_][A-Za-z0-9._-]*|"
        "@sha256:[0-9a-f]{64})$",
        "must have a registry, a repository, and a tag or digest: oci://REGISTRY/REPOSITORY:TAG",
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


def _without_default(schema: dict[str, Any]) -> None:
    """The default is not stored, so that `kubectl describe` stays short."""
    del schema["default"]


class SecretRef(ApiModel):
    """A Secret with what reads the model: a token, or the keys of an object store."""

    name: ObjectName = Field(description="Name of a Secret in the service's namespace.")
    key: Annotated[
        str,
        Field(min_length=1, max_length=253),
        ValidationRules(matching("^[-._a-zA-Z0-9]+$", "must be a key of a Secret: letters, digits, '-', '_' and '.'")),
    ] = Field(default="token", description="Key of the Secret with the token. Unused for s3 and gs.")


class CacheSpec(ApiModel):
    """Storage for downloaded weights: a claim or a folder of the node, which outlive pods, or an emptyDir."""

    claim_name: ObjectName | None = Field(
        default=None,
        description="PersistentVolumeClaim for models. It must be ReadWriteMany if several pods use it.",
    )
    host_path: (
        Annotated[
            str,
            Field(min_length=1, max_length=253),
            ValidationRules(matching(f"^(/{_SEGMENT})+$", "must be an absolute path without '..'")),
        ]
        | None
    ) = Field(
        default=None,
        description="Existing folder of each node, writable for engine.runAsUser of the chart. Rejected unless "
        "serviceLimits.volumeTypes has hostPath.",
    )
    node_local: bool | None = Field(
        default=None,
        description="Use the folder of each node in engine.nodeCache of the chart. A platform without one rejects "
        "it, or, without serviceLimits, gives each pod a cache of its own.",
    )
    size_limit: SizeLimit | None = Field(
        default=None,
        description=f"Size limit of the emptyDir. Absent without another field: {DEFAULT_CACHE_SIZE}.",
    )

    rules: ClassVar[tuple[ValidationRule[CacheSpec], ...]] = (
        ValidationRule(
            "!has(self.claimName) || !has(self.sizeLimit)",
            "claimName and sizeLimit are mutually exclusive: a claim has its own size",
            lambda own: own.claim_name is None or own.size_limit is None,
            field=".sizeLimit",
            reason="FieldValueForbidden",
        ),
        ValidationRule(
            "!has(self.hostPath) || !has(self.claimName) && !has(self.sizeLimit)",
            "hostPath excludes claimName and sizeLimit: a model has one cache, and a folder of the node has no limit",
            lambda own: own.host_path is None or (own.claim_name is None and own.size_limit is None),
            field=".hostPath",
            reason="FieldValueForbidden",
        ),
        ValidationRule(
            "!has(self.nodeLocal) || !self.nodeLocal || !has(self.claimName) && !has(self.hostPath) "
            "&& !has(self.sizeLimit)",
            "nodeLocal excludes claimName, hostPath and sizeLimit: a model has one cache, and the platform bounds it",
            lambda own: not own.node_local or (own.claim_name, own.host_path, own.size_limit) == (None, None, None),
            field=".nodeLocal",
            reason="FieldValueForbidden",
        ),
    )


def _only_for(
    schemes: tuple[str, ...], field: str, is_set: Callable[[ModelSource], bool], hint: str = ""
) -> ValidationRule[ModelSource]:
    names = " and ".join(", ".join(f"{scheme}://" for scheme in schemes).rsplit(", ", 1))
    return ValidationRule(
        f"!has(self.{field}) || self.uri.matches('^({'|'.join(schemes)})://')",
        f"{field} is allowed only for {names} models{hint}",
        lambda own: own.scheme in schemes or not is_set(own),
        field=f".{field}",
        reason="FieldValueForbidden",
    )


class ModelSource(ApiModel):
    """The model: its weights and its name."""

    uri: Annotated[str, Field(min_length=1, max_length=1024), ValidationRules(*URI_RULES)] = Field(
        description="Location of the weights: hf://ORG/REPO (Hugging Face), pvc://CLAIM/PATH (a claim of the "
        "namespace, read-only), file:///PATH (in the engine image), s3://BUCKET/PATH, gs://BUCKET/PATH, "
        "https://HOST/PATH.tar (also .tar.gz) or oci://REGISTRY/REPOSITORY:TAG (an image that the kubelet mounts)."
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
        description="Name that clients send as `model`. Absent: the object's name. A name belongs to the first "
        "service that uses it, and one that begins with NAMESPACE/ to that namespace. NAMESPACE/NAME works too. "
        "A change restarts no engine.",
    )
    revision: (
        Annotated[
            str,
            Field(min_length=1, max_length=253),
            ValidationRules(REVISION_RULE),
        ]
        | None
    ) = Field(default=None, description="Branch, tag or commit of an hf:// repository. Absent: the main branch.")
    digest: (
        Annotated[
            str,
            Field(max_length=71),
            ValidationRules(matching("^sha256:[0-9a-f]{64}$", "must be sha256: and 64 digits of 0-9 and a-f")),
        ]
        | None
    ) = Field(
        default=None,
        description="Digest that an s3://, gs:// or https:// model must have, as status.modelRevision shows it. An "
        "engine does not start with other files. Absent: any.",
    )
    path: (
        Annotated[
            str,
            Field(min_length=1, max_length=253),
            ValidationRules(matching(f"^{_SEGMENT}(/{_SEGMENT})*$", "must be a relative path without '..'")),
        ]
        | None
    ) = Field(default=None, description="Folder of the weights in an oci:// image. Absent: its root.")
    task: Literal["generate", "embed", "score", "transcribe"] = Field(
        default="generate",
        json_schema_extra=_without_default,
        description="Routes that the model serves: generate (chat, completions, responses, "
        "messages), embed (embeddings, rerank, score), score (rerank and score of a cross-encoder) or transcribe "
        "(audio). embed and score start the engine as a pooling model. Absent: generate.",
    )
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Secret for hf:// (a Hugging Face token), https:// (a bearer token), s3:// and gs:// (keys "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally AWS_SESSION_TOKEN; for gs:// an HMAC key). Absent for "
        "s3:// and gs://: the identity of the pods' service account.",
    )
    cache: CacheSpec = Field(default=CacheSpec(), description="Storage for downloaded weights.")

    rules: ClassVar[tuple[ValidationRule[ModelSource], ...]] = (
        _only_for(("hf",), "revision", lambda own: own.revision is not None),
        _only_for(
            _CACHED_SCHEMES,
            "secretRef",
            lambda own: own.secret_ref is not None,
            "; oci:// uses pod.imagePullSecrets",
        ),
        _only_for(FETCHED_SCHEMES, "digest", lambda own: own.digest is not None, "; oci:// has it in the URI"),
        ValidationRule(
            "!has(self.cache) || !has(self.cache.nodeLocal) || !self.cache.nodeLocal ||"
            f" self.uri.matches('^({'|'.join(_CACHED_SCHEMES)})://')",
            "nodeLocal is allowed only for hf://, s3://, gs:// and https:// models: others are not downloaded",
            lambda own: own.is_cached or not own.cache.node_local,
            field=".cache.nodeLocal",
            reason="FieldValueForbidden",
        ),
        _only_for(("oci",), "path", lambda own: own.path is not None),
    )

    @property
    def scheme(self) -> str:
        """The scheme of the URI."""
        return scheme_of(self.uri)

    @property
    def location(self) -> str:
        """The URI after the scheme, without a trailing slash."""
        return location_of(self.uri)

    @property
    def claim(self) -> tuple[str, str] | None:
        """Claim name and path of a pvc:// model; None for other schemes."""
        return claim_of(self.uri)

    @property
    def is_fetched(self) -> bool:
        """Whether the launcher downloads the model before the engine starts."""
        return self.scheme in FETCHED_SCHEMES

    @property
    def is_cached(self) -> bool:
        """Whether the pod has a cache for the model."""
        return self.scheme in _CACHED_SCHEMES

    @property
    def cache_size(self) -> str:
        """Size limit of the cache's emptyDir as a quantity; unused with a claim or a folder of the node."""
        return self.cache.size_limit or DEFAULT_CACHE_SIZE
