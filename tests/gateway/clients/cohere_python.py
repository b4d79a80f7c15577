"""The cohere SDK for Python on a service that embeds. Usage: URL MODEL; prints one line of JSON."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import cohere

url, model = sys.argv[1:]
client = cohere.ClientV2(base_url=url, api_key="none")
ranked = client.rerank(model=model, query="What?", documents=["one", "two", "three"], top_n=3)
try:
    client.rerank(model="nobody", query="a", documents=["b"])
    unknown = 200
except cohere.core.ApiError as error:
    unknown = error.status_code
scores = [result.relevance_score for result in ranked.results]
print(
    json.dumps(
        {
            "results": sorted(r.index for r in ranked.results),
            "sorted": scores == sorted(scores)[::-1],
            "unknown": unknown,
        }
    )
)
