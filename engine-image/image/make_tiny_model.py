"""Make a tiny model with random weights, so that real engines run anywhere without a hub.

4.5 million parameters of the Qwen2 architecture in float32: with fewer bits, random weights give near-ties and equal
prompts may end in different words on two engines. The wide initialisation makes greedy output depend on the prompt,
which is how a wrong KV transfer shows. The tokenizer is trained on Python's own library.

    python make_tiny_model.py FOLDER
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = 20


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:TEXTS]
    bpe.train([str(path) for path in texts], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    wrapped.chat_template = TEMPLATE
    return wrapped


def model() -> Qwen2ForCausalLM:
    """The model; the same weights at every call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def main() -> None:
    """Writes tokenizer and model to the folder named on the command line, readable by everybody."""
    folder = Path(sys.argv[1])
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
