"""The admission webhook's HTTPS server. Every operator replica runs one, leader or not.

kopf can serve webhooks too, but only inside `kopf.operator`, which runs in the leader alone: docs/design/0016 has the
reasons.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web

from plimsoll.adapters.connection_guard import MAX_CONNECTIONS, ConnectionGuard
from plimsoll.adapters.kube_client import KubeClient
from plimsoll.adapters.tls_listener import TlsListener
from plimsoll.controllers.http_server import count_cut
from plimsoll.controllers.isolation import ObjectErrors, supervise
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.controllers.webhook.certificate import CertificateFiles
from plimsoll.controllers.webhook.review import MalformedReview, Validator, answer
from plimsoll.controllers.webhook.review_bodies import BodyLimits, DisplacedBody, ReviewBodies
from plimsoll.controllers.webhook.service_index import ServiceIndex
from plimsoll.controllers.webhook.validation import ValidationResult, validate_change
from plimsoll.resources.platform_config import WebhookSettings
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)

PATH: Final = "/validate"
STOP_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 120.0  # of a connection after an answer; the API server closes its own after 90 s


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server. connections: those without a handshake too.

    head_seconds: for a TLS handshake, and for the head of a connection's first request.
    certificate_seconds: between two looks at the certificate's files. no_certificate_seconds: the same while there is
    none.
    """

    bodies: BodyLimits = field(default_factory=BodyLimits)
    connections: int = MAX_CONNECTIONS
    head_seconds: float = 5.0
    certificate_seconds: float = 30.0
    no_certificate_seconds: float = 5.0


async def run(kube: KubeClient, config: OperatorConfig, settings: WebhookSettings) -> None:
    """Serve until cancelled. A failed component is restarted while the others continue."""
    errors = ObjectErrors()
    index = ServiceIndex(kube, config, errors)
    engine = config.platform.engine

    def validator(new: Object, old: Object | None) -> ValidationResult:
        return validate_change(new, old, index.cluster, engine.defaults.args, engine.gpu_resource)

    async with asyncio.TaskGroup() as group:
        for name, work in index.parts():
            group.create_task(supervise(name, work, errors))
        group.create_task(supervise("webhook", partial(serve, settings, validator), errors))


async def serve(settings: WebhookSettings, validator: Validator, limits: ServerLimits = ServerLimits()) -> None:
    """Serve until cancelled, from the time on that there is a certificate."""
    files = CertificateFiles(Path(settings.certificate_directory))
    await files.wait(limits.no_certificate_seconds)
    runner = web.AppRunner(
        build_app(validator, limits), access_log=None, shutdown_timeout=STOP_SECONDS, keepalive_timeout=IDLE_SECONDS
    )
    await runner.setup()
    assert runner.server is not None
    guard = ConnectionGuard(
        runner.server, count_cut, limits.connections, head_seconds=limits.head_seconds, has_bodies=True
    )
    try:
        with closing(TlsListener(guard, None, settings.port, files.context, limits.head_seconds)):
            while True:
                await asyncio.sleep(limits.certificate_seconds)
                await files.load()
    finally:
        await runner.cleanup()


def build_app(validator: Validator, limits: ServerLimits) -> web.Application:
    """The application, with limits of its memory and time."""
    bodies, of_body = ReviewBodies(limits.bodies), limits.bodies

    async def validate(request: web.Request) -> web.Response:
        try:
            response = answer(orjson.loads(await bodies.read(request)), validator)
        except web.HTTPRequestEntityTooLarge:
            return _failed(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a review has at most {of_body.body_bytes} bytes")
        except TimeoutError:
            return _failed(HTTPStatus.REQUEST_TIMEOUT, f"no whole review within {of_body.seconds:.0f} s")
        except DisplacedBody:
            return _failed(HTTPStatus.SERVICE_UNAVAILABLE, "too many reviews at once, and this one arrived slowly")
        except (ConnectionError, web.RequestPayloadError) as error:
            return _failed(HTTPStatus.BAD_REQUEST, f"the review is not whole: {error}")
        except (orjson.JSONDecodeError, MalformedReview) as error:
            return _failed(HTTPStatus.BAD_REQUEST, str(error))
        return web.Response(body=orjson.dumps(response), content_type="application/json")

    application = web.Application()
    application.router.add_post(PATH, validate)
    return application


def _failed(status: HTTPStatus, message: str) -> web.Response:
    """A request without an answer, which the API server takes for one that was let through."""
    operator_metrics.OPERATOR_ADMISSION_REVIEWS.labels("failed").inc()
    log.warning(None, "admission review without an answer", status=status.value, error=message)
    return web.json_response({"message": message}, status=status)
