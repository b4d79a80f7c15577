"""`python -m bench.prompt_tokens`: a table of errors by kind of request, tokenizer and family of pictures.

Each row is a service of one kind. `first` are errors of the rule of thumb, `learned` those after 50 requests, both of
requests that taught nothing. Half a minute.
"""

from __future__ import annotations

from functools import partial

from bench.prompt_tokens.corpus import KINDS, CorpusRequest, make_corpus
from bench.prompt_tokens.counting import PICTURES, Count, load_tokenizers, prompt_tokens
from bench.prompt_tokens.errors import LEARN, estimate_errors, learn

TEST_REQUESTS = 100


def print_row(kind: str, name: str, requests: list[CorpusRequest], count: Count, picture: str) -> None:
    """One service."""
    counted = partial(prompt_tokens, count=count, picture=PICTURES[picture])
    ratios = learn(requests[:LEARN], counted)
    first, learned = (estimate_errors(requests[LEARN:], counted, given) for given in ({}, ratios))
    label = f"{kind} ({picture})" if kind == "pictures" else kind
    print(f"| {label} | {name} | {first.p50:.0%} | {first.p95:.0%} | {learned.p50:.0%} | {learned.p95:.0%} |", flush=True)


if __name__ == "__main__":
    corpus = make_corpus(LEARN + TEST_REQUESTS)
    print("| kind | tokenizer | first p50 | p95 | learned p50 | p95 |\n|---|---|---|---|---|---|")
    for each, tokenizer in load_tokenizers().items():
        for wanted in KINDS:
            of_kind = [request for request in corpus if request.kind == wanted]
            for family in PICTURES if wanted == "pictures" else ("Qwen2.5-VL",):
                print_row(wanted, each, of_kind, tokenizer, family)
