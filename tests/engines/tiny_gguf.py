"""Writes a llama model of two layers with random weights as GGUF, and serves it with llama.cpp's own server.

python -m tests.engines.tiny_gguf PATH --model PATH --port PORT ...    # needs the packages gguf and xllamacpp

xllamacpp has the server as a library, without its main program. The arguments are read by the parser of `llama-server`,
which the library exports; Python has no other way to it than its symbol.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 128, 4096
UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1  # kinds of tokens in GGUF
PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
SERVER = 12  # LLAMA_EXAMPLE_SERVER of build 11549: another program does not take --alias
PARAMS_OFFSET = object.__basicsize__  # of the params in xllamacpp's object, in bytes


def write_model(path: Path) -> None:
    """Write the model, about 0.5 MB."""
    gguf: Any = importlib.import_module("gguf")
    letters = [chr(97 + number) for number in range(26)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *letters]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(letters)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.05).astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))

    weights("token_embd", len(tokens), WIDTH)
    weights("output", len(tokens), WIDTH)
    norm("output_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(f"{block}.{name}", WIDTH, WIDTH)
        weights(f"{block}.ffn_gate", FEED_FORWARD, WIDTH)
        weights(f"{block}.ffn_up", FEED_FORWARD, WIDTH)
        weights(f"{block}.ffn_down", WIDTH, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(args: Sequence[str]) -> None:
    """Serve with the arguments of `llama-server`, until the process ends. Exit status 2 if it does not take them."""
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    parse = ctypes.CDLL(str(Path(xllamacpp.__file__).with_name("xllamacpp.abi3.so")))[PARSE]
    parse.restype = ctypes.c_bool
    words = (ctypes.c_char_p * (len(args) + 2))(b"llama-server", *map(str.encode, args), None)
    if not parse(len(args) + 1, words, ctypes.c_void_p(id(params) + PARAMS_OFFSET), SERVER, None):
        sys.exit(2)
    server = xllamacpp.Server(params)
    print(f"serving on {server.listening_address}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
    serve(sys.argv[2:])
