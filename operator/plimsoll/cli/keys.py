"""`plimsoll key create|list|revoke`: the gateway's API keys, which are Secrets in the namespace of the release.

A key is printed when it is made and never again, because the cluster has only its hash.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from plimsoll.adapters.kube_client import SECRETS, KubeClient
from plimsoll.api import labels
from plimsoll.api.api_keys import ALL_MODELS, ApiKey, InvalidApiKey, format_time, make_key, read_secret, to_secret
from plimsoll.cli import cluster
from plimsoll.cli.output import MISSING, Screen, format_table
from plimsoll.cli.output_files import print_text
from plimsoll.core.errors import ClusterError, Conflict, Forbidden, NotFound, PlimsollError
from plimsoll.core.units import parse_duration

KubeObject = dict[str, Any]

HEADER: Final = ("NAME", "STATE", "TENANT", "CLASS", "REQUESTS/MIN", "TOKENS/MIN", "EXPIRES", "MODELS")
_DAYS: Final = re.compile(r"([0-9]{1,5})d")
_DAY_S: Final = 86_400.0


class KeyCommandError(PlimsollError):
    """A key cannot be made, listed or revoked; the message has the cause."""


def create(arguments: argparse.Namespace) -> int:
    """Make a key and print it to standard output, alone."""
    options = {
        "tenant": arguments.tenant,
        "class": arguments.request_class,
        "models": arguments.models,
        "requestsPerMinute": arguments.requests_per_minute,
        "tokensPerMinute": arguments.tokens_per_minute,
        "expires": None if arguments.expires is None else expiry(arguments.expires, time.time()),
    }
    fields = {field: value for field, value in options.items() if value is not None}

    async def run() -> str:
        async with cluster.connect(arguments.kubeconfig) as kube:
            return await create_key(kube, arguments.namespace, arguments.name, fields)

    key = asyncio.run(run())
    print_text(f"{key}\n")
    print(
        "This is the only time that the key is shown. Revoke it with:"
        f" plimsoll key revoke {arguments.name} -n {arguments.namespace}",
        file=sys.stderr,
    )
    return 0


def list_all(arguments: argparse.Namespace) -> int:
    """Print a table of the keys, never the keys themselves."""

    async def run() -> list[KubeObject]:
        async with cluster.connect(arguments.kubeconfig) as kube:
            return await list_keys(kube, arguments.namespace)

    secrets = asyncio.run(run())
    if not secrets:
        print_text(f"no API keys in namespace {arguments.namespace}\n")
        return 0
    print_text("\n".join([*keys_table(secrets, Screen.for_stream(sys.stdout), time.time()), ""]))
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    """Delete the Secret of a key."""

    async def run() -> None:
        async with cluster.connect(arguments.kubeconfig) as kube:
            await revoke_key(kube, arguments.namespace, arguments.name)

    asyncio.run(run())
    print_text(f"API key {arguments.name} is revoked\n")
    return 0


async def create_key(kube: KubeClient, namespace: str, name: str, fields: Mapping[str, str]) -> str:
    """Create the Secret of a new key and return the key. Raises KeyCommandError."""
    key = make_key(name)
    try:
        await kube.create(to_secret(namespace, name, key, fields))
    except InvalidApiKey as error:
        raise KeyCommandError(f"API key {name!r}: {error}") from error
    except Conflict as error:
        raise KeyCommandError(
            f"a Secret {name} exists in namespace {namespace}: choose another name, or revoke that key first"
        ) from error
    except ClusterError as error:
        raise _failed(error, "create", namespace) from error
    return key


async def list_keys(kube: KubeClient, namespace: str) -> list[KubeObject]:
    """Return the Secrets that declare API keys. Raises KeyCommandError."""
    try:
        return (await kube.list(SECRETS, namespace, labels.API_KEY))[0]
    except ClusterError as error:
        raise _failed(error, "list", namespace) from error


async def revoke_key(kube: KubeClient, namespace: str, name: str) -> None:
    """Delete the Secret of a key. Raises KeyCommandError, also for a Secret that is no key."""
    try:
        secret = await kube.get(SECRETS, namespace, name)
        if labels.API_KEY not in secret["metadata"].get("labels", {}):
            raise KeyCommandError(f"Secret {name} in namespace {namespace} has no label {labels.API_KEY}: it is no key")
        await kube.delete(SECRETS, namespace, name, secret["metadata"]["uid"])
    except NotFound as error:
        raise KeyCommandError(f"no API key {name} in namespace {namespace}") from error
    except ClusterError as error:
        raise _failed(error, "get and delete", namespace) from error


def keys_table(secrets: list[KubeObject], screen: Screen, now_s: float) -> list[str]:
    """Return one row per key. now_s: seconds since the epoch."""
    rows = [_row(secret, now_s) for secret in sorted(secrets, key=lambda one: str(one["metadata"]["name"]))]
    alarming = {place for place, row in enumerate(rows, 1) if row[1] != "Valid"}
    return format_table([HEADER, *rows], screen, alarm_rows=alarming)


def expiry(text: str, now_s: float) -> str:
    """Return the time of `--expires`: a time as it is, or a duration such as 30d or 12h from now.

    Raises KeyCommandError.
    """
    if text[:4].isdigit() and text[4:5] == "-":
        return text
    try:
        days = _DAYS.fullmatch(text)
        return format_time(now_s + (int(days[1]) * _DAY_S if days else parse_duration(text)))
    except (ValueError, OverflowError) as error:
        raise KeyCommandError(
            f"--expires {text!r} is neither a duration such as 30d or 12h nor a time such as 2027-01-31T00:00:00Z"
        ) from error


def _row(secret: KubeObject, now_s: float) -> tuple[str, ...]:
    name = str(secret["metadata"]["name"])
    try:
        key = read_secret(secret)
    except InvalidApiKey as error:
        return (name, "Invalid", *[MISSING] * 5, str(error))
    return (name, "Expired" if key.is_expired(now_s) else "Valid", *_columns(key))


def _columns(key: ApiKey) -> tuple[str, ...]:
    limits = (key.requests_per_minute, key.tokens_per_minute)
    return (
        key.tenant or key.name,
        key.request_class or MISSING,
        *(MISSING if limit is None else str(limit) for limit in limits),
        MISSING if key.expires_s is None else format_time(key.expires_s),
        ALL_MODELS if key.models is None else ",".join(sorted(key.models)),
    )


def _failed(error: ClusterError, verb: str, namespace: str) -> KeyCommandError:
    if isinstance(error, Forbidden):
        return KeyCommandError(f"forbidden: needs permission to {verb} secrets in namespace {namespace} ({error})")
    return KeyCommandError(f"cannot {verb} secrets in namespace {namespace}: {error}")
