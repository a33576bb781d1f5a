"""What a server is told at its start, validated once. The command line's flags come from these fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strata_lab.settings import ConfigError, check_whole

KIB = 1 << 10


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve.

    Attributes:
        host: address to listen on; 0.0.0.0 is every interface.
        port: TCP port; 0 takes a free one.
        api_key: key that callers must send as "Authorization: Bearer KEY"; several may be given, none asks for none.
        served_model_name: name under which the model is offered; the first of several is the one that answers carry.
            Empty takes the model as it was given.
        max_queue: most requests that wait beside the ones that run; more are answered with 429 and Retry-After.
        max_request_kib: largest request body, KiB.
        max_choices: most answers of one HTTP request, prompts times n.
        max_stream_backlog: tokens that a slow reader may fall behind before its stream is ended.
        request_timeout_s: deadline in seconds of requests that bring none; none waits for ever.
        body_timeout_s: seconds a caller may take to send its request.
        drain_timeout_s: seconds that running requests get to finish after SIGTERM.
        cors_origin: web origin that browsers may call from, "*" for every one; none allows none.
        access_log: write a line per request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    max_queue: int = 256
    max_request_kib: int = 4096
    max_choices: int = 64
    max_stream_backlog: int = 1024
    request_timeout_s: float | None = None
    body_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    cors_origin: tuple[str, ...] = ()
    access_log: bool = False

    def __post_init__(self) -> None:
        for name, smallest, example in (
            ("port", 0, 8000), ("max_queue", 0, 256), ("max_request_kib", 1, 4096), ("max_choices", 1, 64),
            ("max_stream_backlog", 16, 1024),
        ):  # fmt: skip
            check_whole(name, getattr(self, name), smallest, example)
        if self.port > 65535:
            raise ConfigError(f"port={self.port} must be at most 65535; try 8000")
        _positive("body_timeout_s", self.body_timeout_s, 30)
        if self.request_timeout_s is not None:
            _positive("request_timeout_s", self.request_timeout_s, 60)
        if self.drain_timeout_s != 0:
            _positive("drain_timeout_s", self.drain_timeout_s, 30)
        for name in ("api_key", "served_model_name", "cors_origin"):
            values = getattr(self, name)
            object.__setattr__(self, name, (values,) if isinstance(values, str) else tuple(values))
            if not all(isinstance(v, str) and v.strip() == v != "" for v in getattr(self, name)):
                raise ConfigError(f"{name}={values!r} must be texts without spaces around them; leave it out for none")
        if not all(key.isascii() for key in self.api_key):
            raise ConfigError("api_key must be ASCII, since it travels in an HTTP header; try letters and digits")

    @property
    def max_request_bytes(self) -> int:
        """Largest body."""
        return self.max_request_kib * KIB


def _positive(name: str, value: Any, example: int) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a number of seconds above 0; try {example}")
