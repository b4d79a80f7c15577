"""Secrets in text: what is removed, and what must stay."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.engines.redaction import redact

SECRET = "s3cr3t-Value"
TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    "text",
    [
        f"starting: vllm serve x --hf-token {SECRET} --port 8000",
        f"vllm serve x --api-key={SECRET}",
        f"vllm serve --api_key '{SECRET} with spaces'",
        shlex.join(["vllm", "--tracing-password", f"{SECRET} '\" x", "--port", "1"]),
        f'--kv-transfer-config {{"kv_role": "x", "store_password": "{SECRET}"}}',
        f"non-default args: {{'model': 'x', 'api_key': ['{SECRET}'], 'hf_token': '{SECRET}'}}",
        f"Namespace(port=8000, hf_token='{SECRET}', seed=1)",
        f"HF_TOKEN={SECRET}",
        f"401 Client Error for url https://user:{SECRET}@hub.example/api?x=1",
        f"proxy http://{SECRET}@proxy:3128 refused",
        f"https://hub.example/x?token={SECRET}&y=1",
        f"Authorization: Bearer {SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
    ],
)
def test_redact_removes_values_of_secrets(text: str) -> None:
    made = redact(text)
    assert SECRET not in made
    assert "***" in made
    assert redact(made) == made


@pytest.mark.parametrize(
    "token", [TOKEN, "sk-" + "a" * 40, "ghp_" + "b" * 36, "AKIA" + "C" * 16, "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.x-y_z"]
)
def test_redact_removes_known_tokens_anywhere(token: str) -> None:
    assert redact(f"the hub refused {token}.") == "the hub refused ***."


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve x --max-num-batched-tokens 512 --tokenizer a/b --enable-prompt-tokens-details --ssl-keyfile f",
        'Error: secret "nowhere" not found',
        "couldn't find key token in Secret team/hub",
        "spec.model.secretRef.key: must be a key of a Secret",
        "clients reach the service at http://plimsoll-gateway.plimsoll-system.svc/v1",
        "NamespacedName(max_token=5, hf_token=None, use_token=True)",
        "{'eos_token': '</s>', 'hf_token': None}",
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        "--hf-token --port 8000",
        "mail admin@example.com",
    ],
)
def test_redact_keeps_other_text(text: str) -> None:
    assert redact(text) == text


def test_redact_keeps_host_and_user_can_find_the_flag() -> None:
    assert redact("get https://me:pw@hub.example/x") == "get https://***@hub.example/x"
    assert redact("--hf-token abc --seed 1") == "--hf-token *** --seed 1"


PIECES = [
    "--hf-token",
    "api_key",
    "=",
    " ",
    "'",
    '"',
    ":",
    "[",
    "{",
    "x",
    "https://",
    "@",
    "/",
    "***",
    TOKEN,
    "Bearer ",
    "-",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_redact_is_idempotent(text: str) -> None:
    assert redact(redact(text)) == redact(text)
