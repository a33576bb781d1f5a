"""Who answers a benchmark: an engine in this process, or any server that speaks OpenAI's completions.

The engine is used as everybody uses it, through `stream`. A server is asked for usage with the stream, because pieces
of a stream need not be tokens; one that sends no usage is refused, since its tokens could only be guessed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from strata_lab.bench.load import Ask, Reply
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError

TIMEOUT_S = 600.0


class EngineTarget:
    """An open `LLMEngine`."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.name = engine, "strata_lab"

    def answer(self, ask: Ask, reply: Reply) -> None:
        """Stream one request."""
        params = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
        stream = self.engine.stream(ask.prompt, params)
        request_id = stream.request_id
        reply.prompt_tokens = len(self.engine.output(request_id).prompt_token_ids)
        for event in stream:
            if event.token_id >= 0:
                reply.times_s.append(time.perf_counter())
            if event.error is not None:
                raise RuntimeError(event.error)
        reply.output_tokens = len(reply.times_s)


class ServerTarget:
    """A server at a base URL such as "http://127.0.0.1:8000/v1".

    Args:
        url: base URL; "/completions" is added.
        model: the server's name for the model; None asks it which it has.
        api_key: sent as a bearer token.

    Raises:
        ConfigError: httpx is missing, or the server does not say which model it has.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ConfigError("--peer needs the package httpx; pip install 'strata-lab[lab]'") from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"peer={url!r} must be an address; try http://127.0.0.1:8000/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=TIMEOUT_S, limits=limits)
        self.name, self._httpx = url, httpx
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            answer = self._client.get("models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (self._httpx.HTTPError, ValueError, LookupError) as error:
            raise ConfigError(
                f"peer={self.name!r} does not say which models it has ({error}); name one with --peer-model"
            ) from error

    def answer(self, ask: Ask, reply: Reply) -> None:
        """Stream one request."""
        body = {
            "model": self.model, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        usage: dict[str, int] | None = None
        with self._client.stream("POST", "completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {answer.read().decode(errors='replace')[:200]}")
            for event in server_events(answer.iter_lines()):
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:200])
                if any(choice.get("text") for choice in event.get("choices", ())):
                    reply.times_s.append(time.perf_counter())
                usage = event.get("usage") or usage
        if usage is None:
            raise RuntimeError("the server sends no usage with the stream, so its tokens cannot be counted")
        reply.prompt_tokens, reply.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])

    def close(self) -> None:
        """Let the connections go."""
        self._client.close()


def server_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON documents of a stream of server-sent events, up to "[DONE]"."""
    for line in lines:
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
