"""`python -m bench.prompt_tokens`: a table of errors by kind of request, tokenizer and family of pictures.

Each row is a service of one kind. `first` are errors of the rule of thumb, `learned` those after 50 requests, both of
100 requests that taught nothing. Pictures are counted by each family's rule, and estimated by the same rule, or by the
default one where the model's name does not tell its family. `least` are errors that no estimator without the sizes of
pictures behind URLs can go below. Half a minute.
"""

from __future__ import annotations

from functools import partial

from bench.prompt_tokens.corpus import KINDS, CorpusRequest, make_corpus
from bench.prompt_tokens.counting import load_tokenizers, prompt_tokens
from bench.prompt_tokens.errors import LEARN, Counted, estimate_errors, learn, least_errors
from plimsoll.gateway.picture_tokens import DEFAULT_FAMILY, PictureFamily

TEST_REQUESTS = 100


def print_row(label: str, name: str, requests: list[CorpusRequest], counted: Counted, family: PictureFamily) -> None:
    """One service, whose pictures the gateway estimates by this family."""
    ratios = learn(requests[:LEARN], counted, family)
    first, learned = (estimate_errors(requests[LEARN:], counted, given, family) for given in ({}, ratios))
    print(
        f"| {label} | {name} | {first.p50:.0%} | {first.p95:.0%} | {learned.p50:.0%} | {learned.p95:.0%} |", flush=True
    )


if __name__ == "__main__":
    corpus = make_corpus(LEARN + TEST_REQUESTS)
    print("| kind | tokenizer | first p50 | p95 | learned p50 | p95 |\n|---|---|---|---|---|---|")
    for tokenizer, count in load_tokenizers().items():
        for kind in KINDS:
            of_kind = [request for request in corpus if request.kind == kind]
            if "pictures" not in kind:
                by_default = partial(prompt_tokens, count=count, family=DEFAULT_FAMILY)
                print_row(kind, tokenizer, of_kind, by_default, DEFAULT_FAMILY)
                continue
            for family in PictureFamily:
                by_family = partial(prompt_tokens, count=count, family=family)
                print_row(f"{kind}, {family}", tokenizer, of_kind, by_family, family)
                if kind == "pictures behind URLs":
                    least = least_errors(of_kind[LEARN:], by_family)
                    print(
                        f"| {kind}, {family} least | {tokenizer} | | | {least.p50:.0%} | {least.p95:.0%} |", flush=True
                    )
                elif family is not DEFAULT_FAMILY:
                    print_row(f"{kind}, {family} unknown", tokenizer, of_kind, by_family, DEFAULT_FAMILY)
