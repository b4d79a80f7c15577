"""The namespace of the current context, found as kubectl does.

The Kubernetes client reads the credentials, but does not expose the namespace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from plimsoll.cli.json_access import get_list, get_text
from plimsoll.core.errors import PlimsollError

_POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_DEFAULT_NAMESPACE: Final = "default"


class KubeconfigError(PlimsollError):
    """No kubeconfig was found, or it is invalid; the message names the files."""


def current_namespace(
    file: str | None, environment: Mapping[str, str] = os.environ, in_pod: Path = _POD_NAMESPACE_FILE
) -> str:
    """Return the current namespace. file: kubeconfig to read, None for the default search. Raises KubeconfigError."""
    if file is None and "KUBERNETES_SERVICE_HOST" in environment:
        return in_pod.read_text().strip() if in_pod.exists() else _DEFAULT_NAMESPACE
    documents = [_read(path) for path in _paths(file, environment)]
    # As in kubectl, the first file that sets a value wins.
    current = next(filter(None, (get_text(document, "current-context") for document in documents)), None)
    for document in documents:
        for context in get_list(document, "contexts"):
            if get_text(context, "name") == current:
                return get_text(context, "context", "namespace") or _DEFAULT_NAMESPACE
    return _DEFAULT_NAMESPACE


def ensure_context(file: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Raises KubeconfigError without a kubeconfig, or without a current context in it; never in a pod."""
    if file is None and "KUBERNETES_SERVICE_HOST" in environment:
        return
    paths = _paths(file, environment)
    if not any(get_text(_read(path), "current-context") for path in paths):
        found = ", ".join(map(str, paths))
        raise KubeconfigError(f"{found}: has no current-context: run kubectl config use-context NAME")


def _paths(file: str | None, environment: Mapping[str, str]) -> list[Path]:
    if file is not None:
        return [Path(file)]
    listed_paths = [name for name in environment.get("KUBECONFIG", "").split(os.pathsep) if name]
    paths = [Path(name).expanduser() for name in listed_paths or ["~/.kube/config"]]
    existing = [path for path in paths if path.exists()]
    if not existing:
        searched = ", ".join(str(path) for path in paths)
        raise KubeconfigError(f"no kubeconfig at {searched}: set --kubeconfig or $KUBECONFIG")
    return existing


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise KubeconfigError(f"{path}: {reason}") from error
