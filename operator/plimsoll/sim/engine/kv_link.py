"""KV transfers from a prefill engine to a decode engine.

Posting a read is work of the decode engine's main loop, which launches no step meanwhile: 0.7 ms and 2.9 us for each
block of each layer, of which steps lose nine tenths (measured with NIXL between two H200s). The transfer follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

FABRIC_BYTES_PER_S: Final = 1e11  # bytes a second


@dataclass(frozen=True, slots=True)
class KvLink:
    """Cost of KV reads for one engine. bytes_per_s: of the fabric."""

    layers: int
    block_size: int
    kv_bytes_per_token: int
    bytes_per_s: float = FABRIC_BYTES_PER_S
    post_fixed_s: float = 0.7e-3
    post_per_descriptor_s: float = 2.9e-6
    latency_s: float = 1.9e-3
    stall_share: float = 0.9

    def scaled(self, factor: float) -> KvLink:
        """Return a link on which every time is `factor` times as long."""
        return replace(
            self,
            bytes_per_s=self.bytes_per_s / factor,
            post_fixed_s=self.post_fixed_s * factor,
            post_per_descriptor_s=self.post_per_descriptor_s * factor,
            latency_s=self.latency_s * factor,
        )

    def descriptors(self, tokens: int) -> int:
        """Return the descriptors of a read: one for each block of each layer."""
        return self.layers * -(-tokens // self.block_size)

    def transfer_bytes(self, tokens: int) -> int:
        """Return the transferred bytes, which are whole blocks."""
        return -(-tokens // self.block_size) * self.block_size * self.kv_bytes_per_token

    def post_s(self, tokens: int) -> float:
        """Return the time in the main loop, s."""
        return self.post_fixed_s + self.post_per_descriptor_s * self.layers * -(-tokens // self.block_size)

    def transfer_s(self, tokens: int) -> float:
        """Return the transfer time after posting, s."""
        return self.latency_s + self.transfer_bytes(tokens) / self.bytes_per_s
