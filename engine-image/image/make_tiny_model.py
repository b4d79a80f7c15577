"""Make a tiny model with random weights, so that real engines run anywhere without a hub.

4.5 million parameters of the Qwen2 architecture in float32: with fewer bits, random weights give near-ties and equal
prompts may end in different words on two engines. The wide initialisation makes greedy output depend on the prompt,
which is how a wrong KV transfer shows. The tokenizer is trained on Python's own library. The chat template knows tools
in the Hermes form, as those of the Qwen models do: `--tool-call-parser hermes`.

JSON allows white space between any two words of it, and random weights would write it without an end when a grammar
guides them. So the model never chooses a token of white space alone: one dimension of its residual stream is constant,
which gives the output layer a bias.

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
    "{% if tools %}<|im_start|>system\nCall a tool with <tool_call>{"
    '"name": NAME, "arguments": ARGUMENTS'
    "}</tool_call>. Tools:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
    "<tool_call>{{ {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = 20
BIAS_DIMENSION, BIAS_INPUT, BLANK_BIAS = 0, 0.02, -25000.0  # the last is scaled by a norm to a logit of about -100


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


def model(blank: list[int]) -> Qwen2ForCausalLM:
    """The model, which never chooses the tokens `blank`; the same weights at every call."""
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
    made = Qwen2ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        made.model.embed_tokens.weight[:, BIAS_DIMENSION] = BIAS_INPUT
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight[BIAS_DIMENSION] = 0.0
            layer.mlp.down_proj.weight[BIAS_DIMENSION] = 0.0
        made.lm_head.weight[:, BIAS_DIMENSION] = 0.0
        made.lm_head.weight[blank, BIAS_DIMENSION] = BLANK_BIAS
    return made


def main() -> None:
    """Writes tokenizer and model to the folder named on the command line, readable by everybody."""
    folder = Path(sys.argv[1])
    words = tokenizer()
    words.save_pretrained(folder)
    model([token for token in range(len(words)) if words.decode([token]).isspace()]).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
