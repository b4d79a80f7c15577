"""Rules of `check` about releases of Plimsoll in a cluster: their CRDs, versions and scopes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from plimsoll.api import labels
from plimsoll.cli.findings import NOTE, PROBLEM, Finding
from plimsoll.cli.json_access import get_list, get_mapping, get_text, get_value

KubeObject = dict[str, Any]

OPERATORS: Final = f"{labels.NAME}=plimsoll,{labels.COMPONENT}=operator"  # label selector of each release's operator
VERSION: Final = "app.kubernetes.io/version"
_RELEASE_NAME, _RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"
_MAX_FIELDS: Final = 3
_CONFIG: Final = "operator.yaml"


def definitions_before_install(found: Mapping[str, KubeObject]) -> Iterable[Finding]:
    """CRDs that exist before the installation. found: the cluster's, by plural name.

    Helm refuses an object that has no release, or another one.
    """
    owners = set()
    for definition in found.values():
        notes = get_mapping(definition, "metadata", "annotations")
        is_owned = _RELEASE_NAME in notes
        owners.add(f"release {notes.get(_RELEASE_NAMESPACE)}/{notes[_RELEASE_NAME]}" if is_owned else "no Helm release")
    if found:
        message = f"CRDs exist already and belong to {' and '.join(sorted(owners))}: {', '.join(sorted(found))}"
        remedy = "install with the chart value crds.install: false, or with helm install --take-ownership"
        yield Finding(NOTE, "crds", message, remedy)


def definitions(found: Mapping[str, KubeObject], own: Mapping[str, KubeObject]) -> Iterable[Finding]:
    """CRDs of the cluster that are missing, or have other fields than this program's. Both by plural name."""
    missing = sorted(own.keys() - found.keys())
    if len(missing) == len(own):
        message = "the cluster has no CRD of Plimsoll: it is not installed"
        yield Finding(PROBLEM, "crds", message, "helm install plimsoll charts/plimsoll; before it, run check --pre")
        return
    for plural in missing:
        yield Finding(PROBLEM, f"crd {plural}", "the CRD does not exist", "kubectl apply --server-side -f crds/")
    for plural in sorted(own.keys() & found.keys()):
        here, there = (set(_fields(_schema(one.get(plural)))) for one in (own, found))
        if not there:
            remedy = "kubectl apply --server-side -f crds/"
            yield Finding(PROBLEM, f"crd {plural}", f"the CRD does not serve {labels.VERSION}", remedy)
        elif here - there:
            message = f"the CRD is older than this program: it has no {_listed(here - there)}"
            yield Finding(
                PROBLEM, f"crd {plural}", message, "kubectl apply --server-side -f crds/, or upgrade the chart"
            )
        elif there - here:
            message = f"the CRD is newer than this program, which does not know {_listed(there - here)}"
            yield Finding(NOTE, f"crd {plural}", message, "upgrade this program")


def releases(
    operators: Sequence[KubeObject], configs: Sequence[KubeObject], version: str, *, before_install: bool
) -> Iterable[Finding]:
    """Releases of other versions than this program, and releases whose namespaces overlap.

    operators: Deployments. configs: ConfigMaps of the same labels. version: of this program, empty if unknown.
    """
    scopes = {_release(one): _scope(one) for one in configs}
    for one in operators:
        found = get_text(get_mapping(one, "metadata", "labels"), VERSION)
        if version and found not in (None, version) and not before_install:
            message = f"its version is {found}, and that of this program is {version}"
            yield Finding(NOTE, f"release {_release(one)}", message, "use the same version of both")
        if before_install:
            message = "it is installed already"
            remedy = "helm upgrade it, or give both releases disjoint watchNamespaces"
            yield Finding(NOTE, f"release {_release(one)}", message, remedy)
    names = sorted({_release(one) for one in operators})
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            mine, other = scopes.get(first), scopes.get(second)
            if mine is None or other is None:
                continue
            if not mine or not other or mine & other:
                message = f"its namespaces and those of release {second} overlap: the one that came first manages them"
                yield Finding(
                    PROBLEM, f"release {first}", message, "give both disjoint watchNamespaces, or uninstall one"
                )


def _release(obj: KubeObject) -> str:
    return f"{get_text(obj, 'metadata', 'namespace')}/{get_mapping(obj, 'metadata', 'labels').get(labels.INSTANCE)}"


def _scope(config: KubeObject) -> frozenset[str] | None:
    """The namespaces of a release, empty for all; None if its configuration cannot be read."""
    try:
        settings = yaml.safe_load(get_text(config, "data", _CONFIG) or "")
    except yaml.YAMLError:
        return None
    return frozenset(map(str, get_list(settings, "watchNamespaces"))) if isinstance(settings, dict) else None


def _schema(definition: Any) -> Any:
    versions = get_list(definition, "spec", "versions")
    served = next((one for one in versions if get_text(one, "name") == labels.VERSION), None)
    return get_value(served, "schema", "openAPIV3Schema") if get_value(served, "served") is True else None


def _fields(node: Any, path: str = "") -> Iterator[str]:
    """Paths of all fields of a schema."""
    for name, child in get_mapping(node, "properties").items():
        field = f"{path}.{name}" if path else name
        yield field
        yield from _fields(child, field)
    for key, sign in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(get_value(node, key), Mapping):
            yield from _fields(get_value(node, key), path + sign)


def _listed(fields: set[str]) -> str:
    """The first fields; those below another one of them are left out."""
    top = sorted(one for one in fields if not any(one.startswith((f"{other}.", f"{other}[")) for other in fields))
    more = f" and {len(top) - _MAX_FIELDS} more" if len(top) > _MAX_FIELDS else ""
    return f"{', '.join(top[:_MAX_FIELDS])}{more}"
