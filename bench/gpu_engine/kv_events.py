"""What an engine's cache holds by its own KV events, as vLLM publishes them over ZMQ.

Problem: the gateway estimates caches from the prompts that it sent. Engines can say what they hold, for a stream of
messages from each of them and a tokenizer in the gateway.

Idea: an event names the stored block, its parent and its tokens, so that a prompt's blocks are found by walking from
the root. This is what a gateway with these events could know, at the time when it picks an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

GPU: Final = "GPU"
Block = bytes | int  # the engine's hash


class EventIndex:
    """Blocks of one engine's GPU cache. `stored`, `removed`, `cleared`: counts of blocks, and of clearings."""

    def __init__(self) -> None:
        self._children: dict[tuple[Block | None, tuple[int, ...]], Block] = {}
        self._key_of: dict[Block, tuple[Block | None, tuple[int, ...]]] = {}
        self._lock = threading.Lock()
        self.stored = self.removed = self.cleared = 0

    def apply(self, event: Mapping[str, Any]) -> None:
        """One event, decoded. Blocks of other media than the GPU are ignored."""
        with self._lock:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self._children.clear()
                self._key_of.clear()
                self.cleared += 1
            elif event.get("medium") in (None, GPU):
                self._store(event) if kind == "BlockStored" else self._remove(event["block_hashes"])

    def _store(self, event: Mapping[str, Any]) -> None:
        parent, size, token_ids = event["parent_block_hash"], event["block_size"], event["token_ids"]
        for number, block in enumerate(event["block_hashes"]):
            key = (parent, tuple(token_ids[number * size : (number + 1) * size]))
            self._children[key] = parent = block
            self._key_of[block] = key
            self.stored += 1

    def _remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.removed += 1
            key = self._key_of.pop(block, None)
            if key is not None and self._children.get(key) == block:
                del self._children[key]

    def hits(self, token_ids: Sequence[int], size: int) -> int:
        """Tokens of a prompt's whole blocks that the engine holds; the last token of a prompt is always computed."""
        with self._lock:
            parent: Block | None = None
            found = 0
            for begin in range(0, len(token_ids) - size + 1, size):
                block = self._children.get((parent, tuple(token_ids[begin : begin + size])))
                if block is None:
                    break
                parent, found = block, begin + size
        return min(found, (len(token_ids) - 1) // size * size)

    def __len__(self) -> int:
        return len(self._key_of)


class EventReader(threading.Thread):
    """Reads an engine's events into an index until `stop`. `bytes`, `messages`: received; `lost`: gaps."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.index = EventIndex()
        self.bytes = self.messages = self.lost = 0
        self._port, self._ends = port, threading.Event()
        self._next: int | None = None

    def run(self) -> None:
        import msgspec
        import zmq  # comes with vLLM only

        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{self._port}")
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            while not self._ends.is_set():
                if not socket.poll(100):
                    continue
                _topic, number, payload = socket.recv_multipart()
                self._take(int.from_bytes(number, "big"), msgspec.msgpack.decode(payload), len(payload))

    def _take(self, number: int, batch: Sequence[Any], size: int) -> None:
        self.lost += number - self._next if self._next is not None and number > self._next else 0
        self._next = number + 1
        self.messages, self.bytes = self.messages + 1, self.bytes + size
        for event in batch[1]:
            self.index.apply(event)

    def counters(self) -> dict[str, float]:
        """What was received, stored, removed and lost since the start."""
        index = self.index
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "stored": index.stored,
            "removed": index.removed,
            "lost": self.lost,
        }

    def stop(self) -> None:
        self._ends.set()
        self.join(5.0)
