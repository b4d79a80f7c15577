"""The namespace that a person works in: of the current context, as kubectl finds it.

The client that reads the credentials does not tell it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from plimsoll.cli.reading import items, text
from plimsoll.core.errors import PlimsollError

_IN_POD: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_DEFAULT: Final = "default"


class NoKubeconfig(PlimsollError):
    """Nothing says which cluster to ask; the message says where was looked."""


def namespace(file: str | None, environment: Mapping[str, str] = os.environ, in_pod: Path = _IN_POD) -> str:
    """The current namespace. file: the kubeconfig to read, None to look for it. Raises NoKubeconfig."""
    if file is None and "KUBERNETES_SERVICE_HOST" in environment:
        return in_pod.read_text().strip() if in_pod.exists() else _DEFAULT
    documents = [_read(path) for path in _paths(file, environment)]
    # The first file that says a thing wins, as with kubectl.
    current = next(filter(None, (text(document, "current-context") for document in documents)), None)
    for document in documents:
        for context in items(document, "contexts"):
            if text(context, "name") == current:
                return text(context, "context", "namespace") or _DEFAULT
    return _DEFAULT


def _paths(file: str | None, environment: Mapping[str, str]) -> list[Path]:
    if file is not None:
        return [Path(file)]
    named = [name for name in environment.get("KUBECONFIG", "").split(os.pathsep) if name]
    paths = [Path(name).expanduser() for name in named or ["~/.kube/config"]]
    found = [path for path in paths if path.exists()]
    if not found:
        looked = ", ".join(str(path) for path in paths)
        raise NoKubeconfig(f"no kubeconfig at {looked}: name one with --kubeconfig or $KUBECONFIG")
    return found


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        words = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise NoKubeconfig(f"{path}: {words}") from error
