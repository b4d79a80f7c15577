"""A real API server with our CRD, and kubectl to talk to it as a user does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.api.manifests import Manifest
from tests.apiserver import ApiServer

APPLY_MODES = {"client-side": (), "server-side": ("--server-side", "--field-manager=tests")}


@dataclass(frozen=True)
class Kubectl:
    """kubectl as a user of one cluster."""

    server: ApiServer

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """kubectl's answer, whatever it is."""
        command = [str(self.server.kubectl), *arguments]
        environment = {**os.environ, "KUBECONFIG": str(self.server.kubeconfig)}
        return subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, check=False)

    def run_ok(self, *arguments: str, stdin: str = "") -> str:
        """kubectl's output; fails the test with its error."""
        answer = self.run(*arguments, stdin=stdin)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def get(self, *arguments: str) -> Manifest:
        """An object or a list."""
        found: Manifest = json.loads(self.run_ok("get", "-o", "json", *arguments))
        return found

    def apply(self, manifest: Manifest, *flags: str) -> Manifest:
        """The object as it is stored after an apply."""
        stored: Manifest = json.loads(self.run_ok("apply", "-o", "json", *flags, "-f", "-", stdin=json.dumps(manifest)))
        return stored

    def validate(self, manifests: Sequence[Manifest], *flags: str) -> list[str]:
        """What an apply of each manifest says: "" where it is accepted, else the error. Nothing is kept.

        All go in one call: kubectl goes on after an error, and prints one line for each manifest, in their order, on
        one of its two streams.
        """
        named = [_numbered(manifest, number) for number, manifest in enumerate(manifests)]
        stream = "\n---\n".join(json.dumps(manifest) for manifest in named)
        response = self.run("apply", "--dry-run=server", "-o", "name", *flags, "-f", "-", stdin=stream)
        accepted = {line.rpartition("/")[2] for line in response.stdout.splitlines()}
        errors = iter(line for line in response.stderr.splitlines() if line.startswith("Error from server"))
        messages = ["" if manifest["metadata"]["name"] in accepted else next(errors, "") for manifest in named]
        assert next(errors, None) is None, f"kubectl said more than was asked:\n{response.stderr}"
        return messages


def _numbered(manifest: Manifest, number: int) -> Manifest:
    """A name of its own for each manifest, but where the name itself is on trial."""
    metadata: dict[str, Any] = manifest["metadata"]
    return {**manifest, "metadata": {**metadata, "name": f"m{number}"}} if metadata["name"] == "chat" else manifest


@pytest.fixture(scope="session")
def kubectl(cluster: ApiServer) -> Kubectl:
    return Kubectl(cluster)
