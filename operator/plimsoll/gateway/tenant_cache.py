"""A prefix cache for each tenant: the salt by which engines tell the KV blocks of tenants apart.

Problem: an engine that shares KV blocks between tenants answers sooner if another tenant has sent the same beginning of
a prompt. A tenant could guess prompts of others by its TTFT.

Idea: vLLM hashes a request's `cache_salt` with its first block. The gateway knows the tenant and names a salt in a
header, which clients cannot set. The engine's middleware puts it into the body. The gateway's own prefix hashes have
the same scope, so that no request is expected to find blocks of another tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from plimsoll.api.contract import engine_contract
from plimsoll.gateway.prefix_hash import block_hashes
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.service_catalog import ServiceEntry

CACHE_SALT_HEADER: Final = engine_contract().headers["cache_salt"]
_SALT_CHARS: Final = 32


def salt_of(tenant: str) -> str:
    """Returns the salt of a tenant as hexadecimal digits; requests without a tenant have one of their own."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:_SALT_CHARS]


def prefix_hashes(
    prompt: bytes, ctx: RequestContext, service: ServiceEntry, services: Mapping[str, ServiceEntry]
) -> tuple[int, ...]:
    """Returns the hashes of a prompt's blocks, in the scope in which engines share their KV blocks.

    That is the adapter, and the tenant where a service that may take the request isolates tenants.
    """
    scope = "" if ctx.adapter is None else ctx.adapter.name
    fallback = None if ctx.fallback is None else services.get(ctx.fallback)
    if service.isolates_tenants or (fallback is not None and fallback.isolates_tenants):
        scope = f"{scope}\n{ctx.tenant}"
    return block_hashes(prompt, scope)
