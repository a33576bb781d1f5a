"""What every request passes before an endpoint sees it: a name, the key, the server's state, bounds on its body.

Plain ASGI, so that streams are not wrapped. The body is read here, whole and in time, and handed on.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata_lab.server.errors import ApiError
from strata_lab.server.service import Service

KEYLESS = frozenset({"/health"})  # a load balancer has no key
STATELESS = frozenset({"/health", "/metrics", "/openapi.json"})
WITH_BODY = frozenset({"POST", "PATCH", "PUT"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware.

    Args:
        app: what is behind.
        service: knows keys, bounds and state.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [key.encode() for key in service.config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            self._check_state(scope["path"], scope["method"])
            body = await self._body(scope["method"], headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, named)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), named)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in KEYLESS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip().encode("latin-1", "replace")
        # every key is compared, each in constant time: how long it takes tells nothing
        good = [hmac.compare_digest(sent, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(good):
            problem = "is not valid" if sent else "is missing"
            raise ApiError(
                401, f"the API key {problem}; send the header 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    def _check_state(self, path: str, method: str) -> None:
        state = self._service.state
        if path in STATELESS or state == "ready" or (state == "draining" and method == "GET"):
            return
        raise self._service.unavailable()

    async def _body(self, method: str, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None if the caller left while sending it."""
        if method not in WITH_BODY:
            return b""
        limit = self._service.config.max_request_bytes
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive, limit), self._service.config.body_timeout_s)
        except TimeoutError:
            wait = self._service.config.body_timeout_s
            raise ApiError(408, f"the body did not come within {wait:g} s; send it faster", code="slow_body") from None
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and media != "application/json":
            raise ApiError(
                415, f"content-type={media[:60]!r} must be application/json; try -H 'Content-Type: application/json'"
            )
        return body

    async def _read(self, receive: Receive, limit: int) -> bytes | None:
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise self._too_large()
            chunks.append(chunk)
            more = message.get("more_body", False)
        return b"".join(chunks)

    def _too_large(self) -> ApiError:
        limit = self._service.config.max_request_kib
        return ApiError(
            413, f"the body is larger than max_request_kib={limit}; send a shorter prompt", code="too_large"
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what really comes: the caller's leaving."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
