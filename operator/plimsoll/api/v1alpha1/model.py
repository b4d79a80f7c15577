"""Which weights are served and under what name.

A URI has a scheme that says where the weights are. Schemes that are planned are refused by name, so that nobody waits
for a download that will not come; each scheme's own shape has its own message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Final

from pydantic import Field

from plimsoll.api.v1alpha1.base import Model, Rule, Rules, matching
from plimsoll.api.v1alpha1.pod import ObjectName, is_quantity
from plimsoll.core import units

SCHEMES: Final = ("hf", "pvc", "file")
PLANNED_SCHEMES: Final = ("s3", "gs", "oci")
DEFAULT_CACHE_SIZE: Final = "64Gi"

_KNOWN = "use hf://ORG/REPO, pvc://CLAIM/PATH or file:///PATH"
_SEGMENT = "[A-Za-z0-9_][A-Za-z0-9._-]*"


def _scheme(uri: str) -> str:
    return uri.split("://")[0] if "://" in uri else ""


def _shape(scheme: str, pattern: str, message: str) -> Rule[str]:
    """A rule on the URIs of one scheme alone."""
    rule = matching(pattern, message)
    return Rule(
        f"!self.startsWith('{scheme}://') || {rule.cel}",
        message,
        lambda uri: _scheme(uri) != scheme or rule.holds is None or rule.holds(uri),
    )


def _scheme_known(uri: str) -> str:
    scheme = _scheme(uri)
    return f"has unknown scheme {scheme}://; {_KNOWN}" if scheme else f"has no scheme; {_KNOWN}"


_URI_RULES = (
    Rule[str](
        f"!self.matches('^({'|'.join(PLANNED_SCHEMES)})://')",
        f"has a scheme that is not supported yet; {_KNOWN}",
        lambda uri: _scheme(uri) not in PLANNED_SCHEMES,
        message_cel=f"'has scheme ' + self.split('://')[0] + '://, which is not supported yet; {_KNOWN}'",
        say=lambda uri: f"has scheme {_scheme(uri)}://, which is not supported yet; {_KNOWN}",
    ),
    Rule[str](
        f"self.matches('^({'|'.join((*SCHEMES, *PLANNED_SCHEMES))})://')",
        f"has an unknown scheme; {_KNOWN}",
        lambda uri: _scheme(uri) in (*SCHEMES, *PLANNED_SCHEMES),
        message_cel="(self.contains('://') ? 'has unknown scheme ' + self.split('://')[0] + '://' : 'has no scheme')"
        f" + '; {_KNOWN}'",
        say=_scheme_known,
    ),
    _shape("hf", f"^hf://{_SEGMENT}/{_SEGMENT}$", "needs exactly an organisation and a repository: hf://ORG/REPO"),
    _shape(
        "pvc",
        f"^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/{_SEGMENT})+/?$",
        "needs a claim and a path in it, without '..': pvc://CLAIM/PATH",
    ),
    _shape(
        "file",
        f"^file://(/{_SEGMENT})+/?$",
        "needs an absolute path in the engine image, without '..': file:///PATH",
    ),
)


class SecretRef(Model):
    """A key of a Secret that holds a Hugging Face token."""

    name: ObjectName = Field(description="Name of a Secret in the service's namespace.")
    key: Annotated[
        str,
        Field(min_length=1, max_length=253),
        Rules(matching("^[-._a-zA-Z0-9]+$", "must be a key of a Secret: letters, digits, '-', '_' and '.'")),
    ] = Field(default="token", description="Key of the Secret.")


class Cache(Model):
    """Where downloaded weights are kept: a claim that outlives pods, or an emptyDir that does not."""

    claim_name: ObjectName | None = Field(
        default=None,
        description="PersistentVolumeClaim mounted at HF_HOME; several pods need one that is ReadWriteMany.",
    )
    size_limit: (
        Annotated[
            str,
            Field(max_length=32),
            Rules(
                Rule[str](
                    "isQuantity(self) && quantity(self).compareTo(quantity('0')) > 0",
                    "must be a quantity above zero, such as 64Gi",
                    lambda text: is_quantity(text) and units.parse_quantity(text) > 0,
                )
            ),
        ]
        | None
    ) = Field(default=None, description=f"Size limit of the emptyDir; absent without claimName: {DEFAULT_CACHE_SIZE}.")

    rules: ClassVar[tuple[Rule[Cache], ...]] = (
        Rule(
            "!has(self.claimName) || !has(self.sizeLimit)",
            "claimName and sizeLimit exclude each other: a claim has its own size",
            lambda own: own.claim_name is None or own.size_limit is None,
            field=".sizeLimit",
            reason="FieldValueForbidden",
        ),
    )


def _only_hf(field: str, used: Callable[[ModelSource], bool]) -> Rule[ModelSource]:
    return Rule(
        f"!has(self.{field}) || self.uri.startsWith('hf://')",
        f"{field} is only for hf:// models",
        lambda own: own.scheme == "hf" or not used(own),
        field=f".{field}",
        reason="FieldValueForbidden",
    )


class ModelSource(Model):
    """The model: its weights and its name."""

    uri: Annotated[str, Field(min_length=1, max_length=1024), Rules(*_URI_RULES)] = Field(
        description="Where the weights are: hf://ORG/REPO (Hugging Face), pvc://CLAIM/PATH (a folder of a claim in the "
        "service's namespace, mounted read-only), file:///PATH (a folder in the engine image)."
    )
    name: (
        Annotated[
            str,
            Field(min_length=1, max_length=253),
            Rules(
                matching(
                    "^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
                    "must begin with a letter or digit and have only letters, digits, '.', '_', ':', '/' and '-'",
                )
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Name that clients send as `model`; absent: the object's name. The oldest service owns a name; "
        "every service also answers to NAMESPACE/NAME. A change restarts no engine.",
    )
    revision: (
        Annotated[
            str,
            Field(min_length=1, max_length=253),
            Rules(
                matching(
                    "^[A-Za-z0-9][A-Za-z0-9._/-]*$",
                    "must be a branch, a tag or a commit: letters, digits, '.', '_', '/', '-'",
                )
            ),
        ]
        | None
    ) = Field(default=None, description="Branch, tag or commit of an hf:// repository; absent: its main branch.")
    secret_ref: SecretRef | None = Field(
        default=None, description="Hugging Face token, for gated or private repositories."
    )
    cache: Cache = Field(default=Cache(), description="Where downloaded weights are kept.")

    rules: ClassVar[tuple[Rule[ModelSource], ...]] = (
        _only_hf("revision", lambda own: own.revision is not None),
        _only_hf("secretRef", lambda own: own.secret_ref is not None),
    )

    @property
    def scheme(self) -> str:
        """hf, pvc or file."""
        return _scheme(self.uri)

    @property
    def location(self) -> str:
        """What follows the scheme: `ORG/REPO`, `CLAIM/PATH` or `/PATH`, without a slash at the end."""
        return self.uri.split("://", 1)[1].rstrip("/")

    @property
    def claim(self) -> tuple[str, str] | None:
        """Claim and path in it of a pvc:// model, else None."""
        claim, _, path = self.location.partition("/")
        return (claim, path) if self.scheme == "pvc" else None

    @property
    def cache_size(self) -> str:
        """Size limit of the cache's emptyDir, a quantity; unused with a claim."""
        return self.cache.size_limit or DEFAULT_CACHE_SIZE
