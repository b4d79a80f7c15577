"""Requests as users of the openai and anthropic SDKs make them: the gateway's estimate and the engine's usage of each.

    python -m bench.gpu_engine.sdk_requests --out DIR --model FOLDER [--count 100] [--arg=--flag ...]

Problem: the estimate is tested against tokenizers and rules that this project computes. Whether an engine counts the
same was not known.
Idea: two engines of a Qwen2.5-VL without weights (`vision_model`): one with adapters that are loaded while it runs, one
whose arguments bound the pixels of pictures. The SDKs build each request, and its body is read by the gateway's own
parser. The first 50 requests of a kind teach the operator's estimator, and the others are judged.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import json
import signal
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from bench.gpu_engine import caches, lora_adapter, machine, vision_model
from bench.gpu_engine.check import Session
from bench.hardware import measure
from bench.prompt_tokens import corpus
from plimsoll.core.demand.token_ratios import TokenRatioEstimator
from plimsoll.engines import vllm
from plimsoll.gateway.api_routes import ROUTES
from plimsoll.gateway.picture_tokens import PictureRule, picture_rule
from plimsoll.gateway.request_parser import ParsedRequest, parse_body

GOAL: Final = (0.15, 0.40)  # relative error after learning: median and 95th percentile
LEARN: Final = 50
WORKERS: Final = 8
ADAPTERS: Final = ("first", "second", "third")
BOUNDS: Final = (vllm.PROCESSOR_KWARGS, json.dumps({"min_pixels": 50_176, "max_pixels": 401_408}))
SERVING: Final = (
    "--max-model-len", "65536", "--gpu-memory-utilization", "0.4", vllm.KV_CACHE_BYTES, str(8 * 2**30),
    "--enable-auto-tool-choice", "--tool-call-parser",
    "hermes", "--limit-mm-per-prompt", '{"image": 8}', "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',  # weights without training write spaces until the limit
)  # fmt: skip
LORA: Final = (vllm.ENABLE_LORA, vllm.MAX_LORAS, "4", vllm.MAX_LORA_RANK, str(lora_adapter.RANK))
_SIZES: Final = ((40, 40), (100, 80), (320, 240), (640, 480), (1024, 768), (1280, 720), (1920, 1080), (512, 2000))
_ANSWER: Final = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
_CLOSE_S: Final = 60.0  # until the estimator's window is over


@dataclass(frozen=True)
class Counted:
    """A request that was served: what the gateway read, what the engine counted, and whether the answer was right."""

    read: ParsedRequest
    tokens: int
    answered: bool = True


@dataclass(frozen=True)
class Sdks:
    """Both SDKs with one engine, and the bodies that they send."""

    openai: Any
    anthropic: Any
    bodies: list[tuple[str, bytes]]

    @staticmethod
    def of(url: str) -> Sdks:
        """Clients of an engine, without retries."""
        import anthropic
        import httpx2
        import openai

        bodies: list[tuple[str, bytes]] = []

        def keep(request: httpx2.Request) -> None:
            bodies.append((request.url.path, request.content))

        def http() -> httpx2.Client:
            return httpx2.Client(event_hooks={"request": [keep]}, timeout=120.0)

        return Sdks(
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http()),
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, http_client=http()),
            bodies,
        )


Send = Callable[[Sdks, Random, str], tuple[int, bool]]  # prompt tokens by `usage`, and whether the answer was right


def picture(random: Random) -> bytes:
    """A PNG of one of several sizes; no two are equal, so that no cache knows it."""
    width, height = random.choice(_SIZES)
    rows = (b"\0" + random.randbytes(3) * width) * height
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _pictures(random: Random) -> list[str]:
    return [base64.b64encode(picture(random)).decode() for _ in range(random.randint(1, 4))]


def _text(random: Random) -> str:
    return corpus.english(max(20, round(random.lognormvariate(0.0, 0.8) * 300)), random)


def _urls(random: Random) -> list[str]:
    return [f"data:image/png;base64,{one}" for one in _pictures(random)]


def _chat(sdks: Sdks, messages: Sequence[Any], model: str = "m", **fields: Any) -> Any:
    given = {"model": model, "max_tokens": 8, "temperature": 0.0, **fields}
    return sdks.openai.chat.completions.create(messages=messages, **given)


def text(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """A question."""
    answer = _chat(sdks, [{"role": "user", "content": _text(random)}], model)
    return answer.usage.prompt_tokens, answer.model == model


def history(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """A conversation, streamed, whose last event has the usage."""
    roles = ("user", "assistant") * random.randint(1, 8)
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    messages += [{"role": role, "content": _text(random)} for role in (*roles, "user")]
    stream = _chat(sdks, messages, model, stream=True, stream_options={"include_usage": True})
    events = list(stream)
    return events[-1].usage.prompt_tokens, len(events) > 1


def pictures(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """Pictures of several sizes with a text."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in _urls(random)]
    answer = _chat(sdks, [{"role": "user", "content": [*parts, {"type": "text", "text": _text(random)}]}], model)
    return answer.usage.prompt_tokens, answer.model == model


def anthropic_pictures(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """The same by the Messages API, streamed."""
    parts: list[Any] = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        for data in _pictures(random)
    ]
    content = [*parts, {"type": "text", "text": _text(random)}]
    with sdks.anthropic.messages.stream(
        model=model, max_tokens=8, system="Be brief.", messages=[{"role": "user", "content": content}]
    ) as stream:
        answer = stream.get_final_message()
    return answer.usage.input_tokens, answer.role == "assistant"


def response_pictures(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """The same by the Responses API."""
    parts: list[Any] = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in _urls(random)]
    content = [*parts, {"type": "input_text", "text": _text(random)}]
    answer = sdks.openai.responses.create(
        model=model, max_output_tokens=8, store=False, input=[{"role": "user", "content": content}]
    )
    return answer.usage.input_tokens, answer.object == "response"


def _functions(random: Random) -> list[Any]:
    return [corpus.tool(random) for _ in range(random.randint(2, 25))]


def tools(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """Many tools with their schemas."""
    answer = _chat(sdks, [{"role": "user", "content": _text(random)}], model, tools=_functions(random))
    return answer.usage.prompt_tokens, answer.model == model


def tool_results(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """Calls of tools and their results in the history."""
    functions = _functions(random)
    messages: list[Any] = [{"role": "user", "content": _text(random)}]
    for number in range(random.randint(1, 4)):
        name = random.choice(functions)["function"]["name"]
        call = {"name": name, "arguments": json.dumps({"user": _text(random)[:60], "order": number})}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": json.dumps({"rows": [_text(random)]})},
        ]
    answer = _chat(sdks, messages, model, tools=functions)
    return answer.usage.prompt_tokens, answer.model == model


def forced_tool(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """A tool that must be called. Weights without training do not end its arguments."""
    function = {"type": "function", "function": {"name": "answer", "description": _text(random), "parameters": _ANSWER}}
    choice = {"type": "function", "function": {"name": "answer"}}
    answer = _chat(sdks, [{"role": "user", "content": _text(random)}], model, tools=[function], tool_choice=choice,
                   max_tokens=60)  # fmt: skip
    return answer.usage.prompt_tokens, answer.model == model


def anthropic_tools(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """The tools by the Messages API."""
    functions = [each["function"] for each in _functions(random)]
    given = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in functions
    ]
    answer = sdks.anthropic.messages.create(
        model=model, max_tokens=8, tools=given, messages=[{"role": "user", "content": _text(random)}]
    )
    return answer.usage.input_tokens, answer.role == "assistant"


def schema(sdks: Sdks, random: Random, model: str) -> tuple[int, bool]:
    """An answer by a schema: it must be an object of it."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _ANSWER, "strict": True}}
    answer = _chat(sdks, [{"role": "user", "content": _text(random)}], model, response_format=form, max_tokens=60)
    return answer.usage.prompt_tokens, _is_answer(answer.choices[0].message.content or "")


def _is_answer(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and set(found) == {"colour", "count"}


KINDS: Final[Mapping[str, Send]] = {
    "text": text, "history, streamed": history, "pictures": pictures, "pictures, anthropic": anthropic_pictures,
    "pictures, responses": response_pictures, "tools": tools, "tool results": tool_results,
    "tool that must be called": forced_tool, "tools, anthropic": anthropic_tools, "schema": schema,
}  # fmt: skip
_PICTURE_KINDS: Final = tuple(name for name in KINDS if name.startswith("pictures"))
_ADAPTER_KINDS: Final = ("text", "pictures", "tools, anthropic", "schema")


def send(url: str, kind: Send, rule: PictureRule, seed: object, model: str = "m") -> Counted:
    """One request. Raises what the SDK raises, and ValueError if the gateway would have rejected it."""
    sdks = Sdks.of(url)
    with sdks.openai, sdks.anthropic:
        tokens, answered = kind(sdks, Random(str(seed)), model)
    ((path, body),) = sdks.bodies
    read = parse_body(body, ROUTES[path])
    if not isinstance(read, ParsedRequest):
        raise ValueError(f"rejected by the gateway: {read}")
    return Counted(read.for_model(rule), tokens, answered)


def summarise(found: Sequence[Counted]) -> dict[str, Any]:
    """Errors of the estimate of those after the first LEARN: as it is, and with the ratios that the first taught."""
    estimator = TokenRatioEstimator()
    for second, one in enumerate(found[:LEARN]):
        media = {kind.value: float(tokens) for kind, tokens in one.read.media_tokens.items()}
        estimator.on_estimated(float(second), 1.0, float(one.read.prompt.tokens), media)
        estimator.on_counted(float(second), 1.0, float(one.tokens))
    estimator.on_counted(LEARN + _CLOSE_S, 0.0, 0.0)
    ratios = dict(estimator.ratios())
    first = [abs(one.read.prompt.tokens / one.tokens - 1.0) for one in found[LEARN:]]
    learned = [abs(one.read.corrected_prompt(ratios).tokens / one.tokens - 1.0) for one in found[LEARN:]]

    def quantiles(errors: Sequence[float]) -> list[float]:
        return [round(float(np.quantile(errors, share)), 4) for share in (0.5, 0.95)]

    return {
        "requests": len(found),
        "prompt_tokens": sum(one.tokens for one in found),
        "first": quantiles(first),
        "learned": quantiles(learned),
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "wrong_answers": sum(not one.answered for one in found),
    }


def run_kind(session: Session, title: str, url: str, name: str, rule: PictureRule, count: int,
             models: Sequence[str] = ("m",)) -> None:  # fmt: skip
    """Requests of one kind, several at once, to these models in turns."""
    found: list[Counted] = []
    errors: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        futures = [
            pool.submit(send, url, KINDS[name], rule, (title, name, number), models[number % len(models)])
            for number in range(count)
        ]
        for future in futures:
            try:
                found.append(future.result())
            except Exception as error:  # noqa: BLE001  counted, and the others are still worth their time
                errors.append(f"{type(error).__name__}: {error}"[:300])
    figures = summarise(found) if len(found) > LEARN else {"learned": [9.0, 9.0], "wrong_answers": 0}
    learned = figures["learned"]
    passed = not errors and not figures["wrong_answers"] and learned[0] <= GOAL[0] and learned[1] <= GOAL[1]
    session.results.check(f"{title}: {name}", passed, **figures, failed=len(errors), errors=errors[:3])


def refused(session: Session, url: str) -> None:
    """What an engine refuses, so that no estimate needs to know it: bounds of pixels in a request."""
    import openai

    sdks = Sdks.of(url)
    content = [{"type": "image_url", "image_url": {"url": _urls(Random(1))[0]}}]
    status = 200
    try:
        _chat(sdks, [{"role": "user", "content": content}],
              extra_body={"mm_processor_kwargs": {"min_pixels": 4_000_000}})  # fmt: skip
    except openai.APIStatusError as error:
        status = error.status_code
    session.results.check("a request may not bound pixels itself", status == 400, status=status)


def load_adapters(session: Session, url: str, config: Mapping[str, Any]) -> None:
    """Adapters that are made, and loaded while the engine runs."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for name in ADAPTERS:
        folder = lora_adapter.write_adapter(session.out / f"adapter-{name}", config)
        with contextlib.suppress(openai.APIResponseValidationError):
            client.post("/load_lora_adapter", cast_to=str, body={"lora_name": name, "lora_path": str(folder)})
    listed = {one.id for one in client.models.list().data}
    session.results.check("adapters: listed once loaded", set(ADAPTERS) <= listed, models=sorted(listed))


def rule_of(args: Sequence[str]) -> PictureRule:
    """The rule that the gateway has for a service with these arguments."""
    return picture_rule({"spec": {"model": {"uri": "hf://Qwen/Qwen2.5-VL-3B-Instruct"}, "engine": {"args": [*args]}}})


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments("bench.gpu_engine.sdk_requests")
    parser.add_argument("--model", type=Path, help="made by vision_model; absent: made here, which needs LiteLLM")
    parser.add_argument("--tiny", action="store_true", help="a model for a rehearsal on a CPU")
    parser.add_argument("--count", type=int, default=100, help="requests of each kind")
    given = parser.parse_args(argv)
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines that run are killed on the way out
    session = Session(out, "8b", given.runtime, (*SERVING, *given.arg))
    session.model = given.model or vision_model.write_model(out / "models" / "vision", tiny=given.tiny)
    session.results.note("versions", machine.versions())
    arguments: dict[str, tuple[str, ...]] = {"default": LORA, "bounded": BOUNDS}
    with caches.engines(session, arguments) as started:
        urls = {name: run.url for name, run in started.items()}
        for name in KINDS:
            run_kind(session, "default", urls["default"], name, rule_of(()), given.count)
        for name in _PICTURE_KINDS:
            run_kind(session, "bounded", urls["bounded"], name, rule_of(BOUNDS), given.count)
        refused(session, urls["default"])
        load_adapters(session, urls["default"], vision_model.config(tiny=given.tiny)["text_config"])
        for name in _ADAPTER_KINDS:
            run_kind(session, "adapters", urls["default"], name, rule_of(()), given.count, ADAPTERS)
    print(json.dumps({name: session.results.document()[name] for name in ("passed", "failed")}))
    return 1 if session.results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
