"""Envoy's filter that verifies JSON Web Tokens, and the clusters from which it gets the keys of the issuers.

The filter rejects nothing by itself: the picker answers a request without a verified token, in the shape of its route.
Envoy fetches keys in the background. While an issuer does not answer, the keys that are known stay valid, and without
any key no token is.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from plimsoll.gateway.envoy.body_filters import TYPE_URL
from plimsoll.gateway.jwt_issuers import PAYLOAD_HEADER, JwtIssuer
from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

FETCH_SECONDS: Final = 5  # until a fetch of keys fails
REFRESH_SECONDS: Final = 60  # between two fetches: a new key counts after this time
RETRY_SECONDS: Final = 10  # after a fetch that failed
PUBLIC_AUTHORITIES: Final = "/etc/ssl/certs/ca-certificates.crt"  # in Envoy's image


def jwt_filters(settings: PickerSettings) -> list[Json]:
    """Returns the filter for the issuers of these settings, none without issuers."""
    if not settings.jwt_issuers:
        return []
    providers = {f"issuer-{n}": _provider(n, issuer) for n, issuer in enumerate(settings.jwt_issuers)}
    accepted: list[Json] = [{"provider_name": name} for name in providers]
    rule = {"match": {"prefix": "/"}, "requires": {"requires_any": {"requirements": [*accepted, _OR_PICKER_DECIDES]}}}
    return [
        {
            "name": "envoy.filters.http.jwt_authn",
            "typed_config": {
                "@type": f"{TYPE_URL}.extensions.filters.http.jwt_authn.v3.JwtAuthentication",
                "providers": providers,
                "rules": [rule],
            },
        }
    ]


_OR_PICKER_DECIDES: Final[Json] = {"allow_missing_or_failed": {}}


def _provider(number: int, issuer: JwtIssuer) -> Json:
    keys: Json = {"local_jwks": {"inline_string": issuer.jwks}}
    if issuer.jwks_uri:
        keys = {
            "remote_jwks": {
                "http_uri": {
                    "uri": issuer.jwks_uri,
                    "cluster": _cluster_name(number),
                    "timeout": f"{FETCH_SECONDS}s",
                },
                "cache_duration": f"{REFRESH_SECONDS}s",
                "async_fetch": {"failed_refetch_duration": f"{RETRY_SECONDS}s"},
            }
        }
    return {
        "issuer": issuer.issuer,
        "audiences": list(issuer.audiences),
        "require_expiration": True,
        "from_headers": [{"name": "authorization", "value_prefix": "Bearer "}],
        "forward": True,  # to the picker; the route to an engine removes it
        "forward_payload_header": PAYLOAD_HEADER,
        **keys,
    }


def jwks_clusters(settings: PickerSettings) -> list[Json]:
    """Returns one cluster for each issuer whose keys are fetched."""
    found = enumerate(settings.jwt_issuers)
    return [_cluster(number, issuer) for number, issuer in found if issuer.jwks_uri]


def _cluster_name(number: int) -> str:
    return f"jwks/{number}"


def _cluster(number: int, issuer: JwtIssuer) -> Json:
    url = urlsplit(issuer.jwks_uri)
    host = url.hostname or ""
    endpoint = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": url.port or 443}}}}
    authorities = {"inline_string": issuer.ca_bundle} if issuer.ca_bundle else {"filename": PUBLIC_AUTHORITIES}
    name_type = "IP_ADDRESS" if _is_ip(host) else "DNS"
    return {
        "name": _cluster_name(number),
        "type": "STRICT_DNS",
        "dns_lookup_family": "ALL",
        "connect_timeout": f"{FETCH_SECONDS}s",
        "load_assignment": {"cluster_name": _cluster_name(number), "endpoints": [{"lb_endpoints": [endpoint]}]},
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{TYPE_URL}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                **({} if _is_ip(host) else {"sni": host}),
                "common_tls_context": {
                    "validation_context": {
                        "trusted_ca": authorities,
                        "match_typed_subject_alt_names": [{"san_type": name_type, "matcher": {"exact": host}}],
                    }
                },
            },
        },
    }


def _is_ip(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False
