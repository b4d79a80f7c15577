"""The messages between a picker that asks and the owner of a service. Each frame holds one, as a msgpack array.

Clocks differ between pods, so times are seconds before or after the message. Lengths and numbers are bounded: a message
that breaks a bound ends the connection.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES, MAX_REQUEST_TOKENS
from plimsoll.core.types import MediaKind
from plimsoll.gateway.prefix_hash import MAX_BLOCKS

MAX_BATCH: Final = 64  # running requests in one message; with the longest names they fit one frame
MAX_EXTERNAL: Final = 10_000  # addresses in one message
_MAX_SECONDS: Final = 10_000_000.0

Name: TypeAlias = Annotated[str, Meta(max_length=600)]
RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
Address: TypeAlias = Annotated[str, Meta(max_length=100)]
Seconds: TypeAlias = Annotated[float, Meta(ge=-_MAX_SECONDS, le=_MAX_SECONDS)]
Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
TokenSum: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS * MAX_REQUEST_SEQUENCES)]
Sequences: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_REQUEST_SEQUENCES)]
OutputTokens: TypeAlias = Annotated[int, Meta(ge=1)]
Hash: TypeAlias = Annotated[int, Meta(ge=0)]
Blocks: TypeAlias = Annotated[tuple[Hash, ...], Meta(max_length=MAX_BLOCKS)]
Headers: TypeAlias = Annotated[dict[Name, Name], Meta(max_length=32)]
Instance: TypeAlias = Annotated[bytes, Meta(max_length=16)]
View: TypeAlias = Annotated[bytes, Meta(max_length=16)]
Amount: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e15)]
Number: TypeAlias = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message of either side."""


class Greeting(Message):
    """The first message of the side that connects: which gateway it is."""

    gateway: Name


class Ping(Message):
    """Asks for a sign of life. `view` is the digest of `Ownership.view`, empty from an earlier release."""

    view: View = b""


class Pong(Message):
    """The answer to a ping, with the view of the other side, and messages that earlier releases do not take.

    `instance` names the process: one that takes `SpentCopies` has one, and one that started again has another.
    """

    view: View = b""
    takes_first_tokens: bool = False
    takes_spent_limits: bool = False
    instance: Instance = b""


class Question(Message):
    """What the owner must know of a request to decide about it. `number` is that of the answer.

    `claims_retry`: the client marks it as a retry. `can_queue`: the asking gateway has memory for its body.
    `rate_headers` are those of the key's limits. The fields after `age_s` are those of `RequestContext`.
    `may_fall_back`: another service may take the request. `schema_tokens` are apart from the other kinds: a kind that a
    gateway of an earlier release does not know would end the connection.
    """

    number: Number
    request_id: RequestId
    service: Name
    claims_retry: bool
    can_queue: bool
    rate_headers: Headers
    age_s: Seconds
    model: Name
    route: Name
    prompt_tokens: Tokens
    sequences: Sequences
    max_tokens: OutputTokens | None
    stream: bool
    n: Sequences
    prompt_field: Name
    body_digest: Hash
    idempotency_key: Name | None
    block_hashes: Blocks
    key_name: Name
    tenant: Name
    request_class: Annotated[bytes, Meta(max_length=65536)]
    estimate_total: TokenSum
    estimate_media: dict[MediaKind, TokenSum]
    first_token_in_s: Seconds | None
    complete_in_s: Seconds | None
    timeout_s: Seconds
    timeout_source: Name
    may_fall_back: bool = True
    is_estimated: bool = True
    schema_tokens: TokenSum = 0


class Running(Message):
    """A request at an engine. `gateways` that did not decide about it need this to count it.

    `age_s` is the time since it arrived at its gateway, and `queued_s` until it was sent to the engine.
    """

    request_id: RequestId
    service: Name
    endpoint: Address
    prefill: Address | None
    age_s: Seconds
    queued_s: Seconds
    request_class: Name
    tenant: Name
    body_digest: Hash
    prompt_tokens: Tokens
    max_tokens: OutputTokens | None
    sequences: Sequences
    block_hashes: Blocks
    stream: bool
    route: Name
    adapter: Annotated[str, Meta(max_length=128)] = ""


class Queued(Message):
    """The owner has queued the request; its answer comes later."""

    number: Number


class Answer(Message):
    """The owner's decision: the HTTP response for Envoy, and the request at its engine if it is admitted.

    `service` handled it, with this class.
    """

    number: Number
    reply: bytes
    running: Running | None
    service: Name
    request_class: Name
    is_retry: bool


class Refused(Message):
    """The owner does not decide about the request. `is_moved`: it was queued here, and has another owner now."""

    number: Number
    is_moved: bool = False


class Withdrawn(Message):
    """The request is not to be sent: its client has left, or its gateway did not wait for the answer."""

    number: Number
    request_id: RequestId


class RunningRequests(Message):
    """Requests that the sender's Envoy carries to engines of services that the receiver owns.

    `is_last`: all have been named since the connection was made.
    """

    requests: Annotated[list[Running], Meta(max_length=MAX_BATCH)]
    is_last: bool = False


class FirstToken(Message):
    """A running response has begun. The fields are those of `AccessRecord`."""

    request_id: RequestId
    upstream: Address
    status: int
    ttft_us: int
    received_us: int | None = None


class Ended(Message):
    """A request has ended. The fields are those of `AccessRecord`; all but the ID are None if its record is lost."""

    request_id: RequestId
    upstream: Address | None = None
    status: int | None = None
    flags: Name | None = None
    ttft_us: int | None = None
    duration_us: int | None = None
    received_us: int | None = None
    sent_bytes: int | None = None


class External(Message):
    """Requests at engines that the sender's Envoy carries and no picker decided about, by address. Idle ones lack."""

    counts: Annotated[dict[Address, Annotated[int, Meta(ge=0, le=1_000_000)]], Meta(max_length=MAX_EXTERNAL)]


class Charge(Message):
    """Asks the owner of an API key to take a request of so many tokens off its limits, which are per minute."""

    number: Number
    key_name: Name
    requests_per_minute: OutputTokens | None
    tokens_per_minute: OutputTokens | None
    tokens: TokenSum


class Charged(Message):
    """Whether the request may pass, by the limits of its key. `message` is the rejection's, "" without one."""

    number: Number
    headers: Headers
    message: str = ""
    eta_s: Seconds = 0.0


class SpentLimit(Message):
    """What the sender has admitted of a tenant's quota of a service, or of a key's limits, and is not refilled yet."""

    name: Name
    requests: Amount
    tokens: Amount
    service: Name | None = None
    requests_per_minute: OutputTokens | None = None
    tokens_per_minute: OutputTokens | None = None


class SpentLimits(Message):
    """Limits that the sender counted and the receiver owns."""

    spent: Annotated[list[SpentLimit], Meta(max_length=MAX_BATCH)]


class SpentCopies(Message):
    """What this process, the owner, has counted: for the gateway that is to own it if this one is killed."""

    instance: Instance
    spent: Annotated[list[SpentLimit], Meta(max_length=MAX_BATCH)]


ToOwner: TypeAlias = (
    Greeting
    | Ping
    | Question
    | Withdrawn
    | RunningRequests
    | FirstToken
    | Ended
    | External
    | Charge
    | SpentLimits
    | SpentCopies
)  # from the asking side
FromOwner: TypeAlias = Pong | Queued | Answer | Refused | Charged

encode = msgspec.msgpack.Encoder().encode
decode_to_owner = msgspec.msgpack.Decoder(ToOwner).decode
decode_from_owner = msgspec.msgpack.Decoder(FromOwner).decode
