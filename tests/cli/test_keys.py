"""Keys are made, listed and revoked; the cluster gets hashes, the user the key, once."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api.api_keys import key_digest, read_secret
from plimsoll.cli import cluster
from plimsoll.cli.keys import KeyCommandError, create_key, expiry, keys_table, list_keys, revoke_key
from plimsoll.cli.main import main
from plimsoll.cli.output import Screen
from plimsoll.core.errors import BackendUnavailable, Conflict, Forbidden, NotFound

NAMESPACE = "plimsoll-system"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z


class SecretApi(KubeClient):
    """An API server with Secrets. error: what it answers instead of the next result."""

    def __init__(self, *secrets: dict[str, Any]) -> None:
        super().__init__(None)
        self.secrets = {one["metadata"]["name"]: one for one in secrets}
        self.error: Exception | None = None
        self.requested: list[tuple[str, str, Any]] = []

    async def _json(self, method: str, path: str, query: Any = None, body: Any = None, *_: Any) -> Any:
        self.requested.append((method, path, query))
        if self.error is not None:
            raise self.error
        name = path.removeprefix(f"{SECRETS}/")
        if method == "POST":
            if body["metadata"]["name"] in self.secrets:
                raise Conflict("exists", 409)
            self.secrets[body["metadata"]["name"]] = body | {"metadata": body["metadata"] | {"uid": "u1"}}
            return body
        if path == SECRETS:
            return {"items": copy.deepcopy(list(self.secrets.values()))}
        if name not in self.secrets:
            raise NotFound("no such secret", 404)
        if method == "DELETE":
            assert body["preconditions"] == {"uid": self.secrets.pop(name)["metadata"]["uid"]}
            return {}
        return copy.deepcopy(self.secrets[name])

    async def _page(self, path: str, query: dict[str, str], *, whole: bool) -> Any:
        return await self._json("GET", path, query)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> SecretApi:
    made = SecretApi()

    @asynccontextmanager
    async def connect(_: str | None) -> AsyncIterator[KubeClient]:
        yield made

    monkeypatch.setattr(cluster, "connect", connect)
    return made


def test_create_prints_key_alone_and_stores_its_hash(api: SecretApi, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tenant", "team-a", "--class", "batch", "--models", "chat,lab/draft", "--requests-per-minute", "60"]
    options += ["--tokens-per-minute", "9000", "--expires", "2027-01-31T00:00:00Z"]
    assert main(["key", "create", "ci", *options]) == 0
    out, err = capsys.readouterr()
    key = out.strip()
    assert key.startswith("plim-ci-")
    assert "only time" in err
    assert key not in err
    found = read_secret(api.secrets["ci"])
    assert found.digest == key_digest(key.encode())
    assert (found.tenant, found.request_class, found.models) == ("team-a", "batch", {"chat", "lab/draft"})
    assert (found.requests_per_minute, found.tokens_per_minute) == (60, 9000)
    assert key not in str(api.secrets)


@pytest.mark.parametrize(("options", "namespace"), [([], NAMESPACE), (["-n", "gateways"], "gateways")])
def test_create_prints_the_command_that_revokes(
    api: SecretApi, capsys: pytest.CaptureFixture[str], options: list[str], namespace: str
) -> None:
    assert main(["key", "create", "ci", *options]) == 0
    assert capsys.readouterr().err.rstrip().endswith(f"Revoke it with: plimsoll key revoke ci -n {namespace}")


def test_list_shows_state_and_no_key(api: SecretApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "list"]) == 0
    assert capsys.readouterr().out == f"no API keys in namespace {NAMESPACE}\n"
    main(["key", "create", "ci"])
    main(["key", "create", "old", "--expires", "2026-01-01T00:00:00Z", "--models", "chat"])
    keys = capsys.readouterr().out.split()
    api.secrets["bad"] = {"metadata": {"name": "bad"}, "data": {"hash": "eA=="}}
    assert main(["key", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows[1:]] == [["bad", "Invalid", "-"], ["ci", "Valid", "ci"], ["old", "Expired", "old"]]
    assert rows[3][-2:] == ["2026-01-01T00:00:00Z", "chat"]
    assert rows[2][-1] == "*"
    assert not any(key in str(rows) for key in keys)
    assert api.requested[-1][2]["labelSelector"] == "plimsoll.dev/api-key"


def test_revoke_deletes_only_keys(api: SecretApi, capsys: pytest.CaptureFixture[str]) -> None:
    main(["key", "create", "ci"])
    api.secrets["tls"] = {"metadata": {"name": "tls", "uid": "u2"}, "data": {}}
    assert main(["key", "revoke", "ci"]) == 0
    assert "API key ci is revoked" in capsys.readouterr().out
    assert main(["key", "revoke", "ci"]) == 1
    assert f"no API key ci in namespace {NAMESPACE}" in capsys.readouterr().err
    assert main(["key", "revoke", "tls"]) == 1
    assert "it is no key" in capsys.readouterr().err
    assert list(api.secrets) == ["tls"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["ci", "--expires", "soon"], "--expires 'soon' is neither a duration"),
        (["ci", "--expires", "2027-01-31"], "expires: must be a time with a zone"),
        (["ci", "--models", ""], "models: must be 1 to 100 model names"),
        (["ci", "--requests-per-minute", "0"], "requestsPerMinute: must be a whole number"),
        (["Team.A"], "the name must have at most 63"),
    ],
)
def test_create_refuses_bad_options(
    options: list[str], words: str, api: SecretApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "create", *options]) == 1
    out, err = capsys.readouterr()
    assert words in err
    assert (out, err.count("\n"), api.secrets) == ("", 1, {})


def test_expiry_accepts_times_and_durations() -> None:
    assert expiry("30d", NOW_S) == "2027-02-14T08:00:00Z"
    assert expiry("1h30m", NOW_S) == "2027-01-15T09:30:00Z"
    assert expiry("2027-01-31T00:00:00+01:00", NOW_S) == "2027-01-31T00:00:00+01:00"


async def test_errors_name_cause_and_permission() -> None:
    api = SecretApi()
    await create_key(api, NAMESPACE, "ci", {})
    with pytest.raises(KeyCommandError, match=f"a Secret ci exists in namespace {NAMESPACE}: choose another name"):
        await create_key(api, NAMESPACE, "ci", {})
    api.error = Forbidden("no", 403)
    for call, verb in (
        (create_key(api, NAMESPACE, "x", {}), "create"),
        (list_keys(api, NAMESPACE), "list"),
        (revoke_key(api, NAMESPACE, "ci"), "get and delete"),
    ):
        with pytest.raises(KeyCommandError, match=f"needs permission to {verb} secrets in namespace {NAMESPACE}"):
            await call
    api.error = BackendUnavailable("gone")
    with pytest.raises(KeyCommandError, match="cannot list secrets in namespace plimsoll-system: gone"):
        await list_keys(api, NAMESPACE)


def test_table_names_what_is_invalid() -> None:
    lines = keys_table([{"metadata": {"name": "bad"}, "data": {"hash": "eA=="}}], Screen(), NOW_S)
    assert "hash: must be 'sha256:' and 64 hexadecimal digits" in lines[1]
