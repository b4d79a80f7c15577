"""A limit on the connections of one source address.

Problem: one client can open so many connections that no other client gets one. Envoy counts connections per filter
chain, not per source.

Idea: divide sources into groups by a hash of their address, of IPv6 addresses by their /64: a client has as many of
those as it likes. Each group has filter chains of its own, which share the listener's configuration, and each chain has
a limit. A source takes connections from its own group only. The hash depends on the pod, so two sources that share a
group at one gateway rarely share one at another.

A connection has a filter chain once its first bytes have arrived. Until then it counts towards the limit of all
connections only, which is eight times as high. It is closed after the time limit of the first byte. Only a listener
filter can wait for that byte, and filter chains are chosen after the listener filters. Those of Envoy 1.40 limit the
rate of all connections together (`local_ratelimit`), and count none by source.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final

from plimsoll.gateway.envoy.body_filters import TYPE_URL
from plimsoll.gateway.identity import IPV6_NETWORK_BITS
from plimsoll.gateway.settings import SOURCE_GROUPS, PickerSettings

Json = dict[str, Any]

SOURCE_STAT: Final = "source"  # prefix of the counters, which are sums over all chains
_SOURCE_STATE = "plimsoll.source"
_NETWORK_INPUTS = f"{TYPE_URL}.extensions.matching.common_inputs.network.v3"


def source_filter() -> Json:
    """Returns the listener filter that keeps a connection's source for the matcher.

    An IPv4 address has fewer bits than the mask, and counts as a whole.
    """
    source = f"%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT({IPV6_NETWORK_BITS})%"
    state = {
        "object_key": _SOURCE_STATE,
        "factory_key": "envoy.string",
        "format_string": {"text_format_source": {"inline_string": source}},
    }
    return {
        "name": "envoy.filters.listener.set_filter_state",
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.filters.listener.set_filter_state.v3.Config",
            "on_accept": [state],
        },
    }


def grouped_chains(chains: Mapping[str, Json], settings: PickerSettings) -> Json:
    """Returns the listener's filter chains and their matcher, from the chain of each transport protocol.

    The protocol "" stands for any. Chains of TLS are chosen before those of any protocol.
    """
    groups = [
        {**chain, "name": _name(protocol, group), "filters": [_limit(settings), *chain["filters"]]}
        for protocol, chain in chains.items()
        for group in range(SOURCE_GROUPS)
    ]
    by_protocol = {protocol: {"matcher": _by_source(protocol, settings)} for protocol in chains if protocol}
    plain = _by_source("", settings)
    if not by_protocol:
        return {"filter_chains": groups, "filter_chain_matcher": plain}
    protocol_input = {"name": "protocol", "typed_config": {"@type": f"{_NETWORK_INPUTS}.TransportProtocolInput"}}
    tree = {"input": protocol_input, "exact_match_map": {"map": by_protocol}}
    return {
        "filter_chains": groups,
        "filter_chain_matcher": {"matcher_tree": tree, "on_no_match": {"matcher": plain}},
    }


def _name(protocol: str, group: int) -> str:
    return f"{protocol or 'any'}-{group}"


def _limit(settings: PickerSettings) -> Json:
    """Returns the network filter that closes new connections of a chain which has its share."""
    return {
        "name": "envoy.filters.network.connection_limit",
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.filters.network.connection_limit.v3.ConnectionLimit",
            "stat_prefix": SOURCE_STAT,
            "max_connections": settings.max_connections_per_source,
        },
    }


def _by_source(protocol: str, settings: PickerSettings) -> Json:
    """Returns a matcher from the source address to the chain of its group."""
    matchers = [
        {"predicate": {"single_predicate": _is_at_least(group, settings)}, "on_match": _use(_name(protocol, group))}
        for group in range(SOURCE_GROUPS - 1, 0, -1)
    ]
    return {"matcher_list": {"matchers": matchers}, "on_no_match": _use(_name(protocol, 0))}


def _is_at_least(group: int, settings: PickerSettings) -> Json:
    hashing = {
        "@type": f"{TYPE_URL}.extensions.matching.input_matchers.consistent_hashing.v3.ConsistentHashing",
        "threshold": group,
        "modulo": SOURCE_GROUPS,
        "seed": zlib.crc32(settings.pod.encode()),
    }
    return {
        "input": {
            "name": "source",
            "typed_config": {"@type": f"{_NETWORK_INPUTS}.FilterStateInput", "key": _SOURCE_STATE},
        },
        "custom_match": {"name": "envoy.matching.matchers.consistent_hashing", "typed_config": hashing},
    }


def _use(chain: str) -> Json:
    name = {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": chain}
    return {"action": {"name": "chain", "typed_config": name}}
