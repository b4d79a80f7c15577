"""Secrets in text: what is removed, and what must stay."""

from __future__ import annotations

import json
import shlex
import string
from base64 import b64encode
from collections.abc import Callable
from types import SimpleNamespace

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


def shell(*words: str) -> str:
    return shlex.join(["vllm", "serve", *words, "--port", "1"])


# Each makes a text with two secrets.
FORMS: dict[str, Callable[[str, str], str]] = {
    "flag": lambda a, b: shell("--hf-token", a, "--tracing-password", b),
    "flag with =": lambda a, b: shell(f"--hf-token={a}", f"--tracing-password={b}"),
    "flag of several keys": lambda a, b: shell("--api-key", a, b),
    "list of words": lambda a, b: json.dumps(["--hf-token", a, "--port", "1", "--api_key", b]),
    "list of words with =": lambda a, b: repr([f"--hf-token={a}", f"--api-key={b}"]),
    "list of words with several keys": lambda a, b: repr(["serve", "--api-key", a, b, "--port", "1"]),
    "dict": lambda a, b: str({"api_key": a, "hf_token": b}),
    "dict with a list": lambda a, b: f"non-default args: { ({'api_key': [a, b], 'seed': 1}) }",
    "dict with a tuple": lambda a, b: str({"api_key": (a, b)}),
    "camel case": lambda a, b: json.dumps({"secretAccessKey": a, "spec": {"clientSecret": b}}),
    "namespace": lambda a, b: str(SimpleNamespace(hf_token=a, clientSecret=b, seed=1)),
    "namespace with a list": lambda a, b: str(SimpleNamespace(seed=1, api_key=[a, b])),
}
# These have no quotes, so that the secret ends with the word.
WORD_FORMS: dict[str, Callable[[str, str], str]] = {
    "URL": lambda a, b: f"GET https://{a}:{b}@hub.example/x",
    "URL with a slash in the password": lambda a, b: f"GET https://user:{a}/{b}@hub.example/x",
    "URL with an @ in the password": lambda a, b: f"GET https://user:{a}@{b}@hub.example/x",
    "URL query": lambda a, b: f"GET https://hub.example/x?token={a}&clientSecret={b}",
    "environment": lambda a, b: f"HF_TOKEN={a} AWS_SECRET_ACCESS_KEY={b}",
    "header": lambda a, b: f"Authorization: Basic {a}\nproxy-authorization: bearer {b}",
    "header in a dict": lambda a, b: str({"Authorization": f"Basic {a}", "x-api-key": b}),
    "JSON in JSON": lambda a, b: json.dumps(json.dumps({"storePassword": a, "access_key": [b]})),
    "basic": lambda a, b: f"[('x', 'Basic {b64encode(f'{a}:{b}'.encode()).decode()}')]",
}
LETTERS = string.ascii_letters + string.digits + "+/_.-"
LINES = LETTERS + " '\"\\,;:=[](){}@#$"


def secrets_of(alphabet: str) -> st.SearchStrategy[str]:
    return st.tuples(st.text(alphabet, min_size=4), st.text(string.ascii_letters, min_size=4)).map("z3Q".join)


def assert_redacted(form: Callable[[str, str], str], secrets: list[str]) -> None:
    text = form(*(f"s{number}{secret}" for number, secret in enumerate(secrets)))
    made = redact(text)
    assert "***" in made
    assert redact(made) == made
    for number, secret in enumerate(secrets):
        assert f"s{number}{secret}" not in made
        end = secret.partition("z3Q")[2]
        assert end not in made or end in form("", ""), "nor its end"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(secrets=st.lists(secrets_of(LINES), min_size=2, max_size=2))
def test_redact_removes_any_secret_in_each_form(form: Callable[[str, str], str], secrets: list[str]) -> None:
    assert_redacted(form, secrets)


@pytest.mark.parametrize("form", WORD_FORMS.values(), ids=WORD_FORMS)
@given(secrets=st.lists(secrets_of(string.ascii_letters + string.digits + "_.-~"), min_size=2, max_size=2))
def test_redact_removes_any_secret_of_one_word(form: Callable[[str, str], str], secrets: list[str]) -> None:
    assert_redacted(form, secrets)


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
        "spec.engine.args: --api-key is set by Plimsoll: remove it",
        "Basic authentication failed, basic credentials are missing",
        "https://registry:5000/team/image@sha256",
        "['--enable-prompt-tokens-details', '--api-key-file', 'f']",
        "maxTokens=x, secretKeyRef='y', {'secretName': 'x'}",
    ],
)
def test_redact_keeps_other_text(text: str) -> None:
    assert redact(text) == text


def test_redact_keeps_host_and_user_can_find_the_flag() -> None:
    assert redact("get https://me:pw@hub.example/x") == "get https://***@hub.example/x"
    assert redact("--hf-token abc --seed 1") == "--hf-token *** --seed 1"
    assert redact("--hf-token abc model --api-key k1 k2 --seed 1") == "--hf-token *** model --api-key *** --seed 1"
    assert redact("{'api_key': ['a', 'b'], 'seed': 'x'}") == "{'api_key': [***], 'seed': 'x'}"
    assert redact('["--api-key", "a", "--seed", "1"]') == '["--api-key", ***, "--seed", "1"]'


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
    "Basic ",
    "Authorization",
    '"--api-key"',
    "(",
    ",",
    "\\",
    "-",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_redact_is_idempotent(text: str) -> None:
    assert redact(redact(text)) == redact(text)
