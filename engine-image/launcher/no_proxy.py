"""Networks in NO_PROXY, in a form that downloads of weights understand.

Problem: clusters list networks in NO_PROXY (`10.0.0.0/8,fd00::/8`). The HTTP client of huggingface_hub fails on a
network of IPv6 addresses before its first request, and does not apply one of IPv4 addresses.

Idea: leave out networks, and name instead the addresses in them that this container asks: those in the endpoints of
hub and object stores.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Mapping
from typing import Final

VARIABLES: Final = ("NO_PROXY", "no_proxy")
ENDPOINT_VARIABLES: Final = (
    "HF_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_STS",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "STORAGE_EMULATOR_HOST",
)


def without_networks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change, with their new values."""
    found = dict.fromkeys(_address(environment.get(variable, "")) for variable in ENDPOINT_VARIABLES)
    addresses = [address for address in found if address is not None]
    changed = {}
    for variable in VARIABLES:
        entries = [entry.strip() for entry in environment.get(variable, "").split(",") if entry.strip()]
        networks = {entry: network for entry in entries if (network := _network(entry)) is not None}
        if networks:
            hosts = [entry for entry in entries if entry not in networks]
            hosts += [str(one) for one in addresses if any(one in network for network in networks.values())]
            changed[variable] = ",".join(hosts)
    return changed


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "/" not in entry:
        return None
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _address(url: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(urllib.parse.urlsplit(url).hostname or "")
    except ValueError:
        return None
