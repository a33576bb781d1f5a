"""What answers look like, for `/openapi.json`: the documents themselves are written by the writers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from strata_lab.server.errors import TYPES


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error."""

    error: ErrorDetail


class Cached(BaseModel):
    """Of the prompt."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


class TextChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class Completion(BaseModel):
    """Answer of /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    warnings: list[str] = Field(default_factory=list)


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    warnings: list[str] = Field(default_factory=list)


class Generated(BaseModel):
    """Answer of /generate."""

    text: list[str]
    outputs: list[dict[str, Any]]
    model: str
    usage: Usage
    warnings: list[str] = Field(default_factory=list)


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    weight_format: str


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: str
    data: list[ModelCard]


class Tokens(BaseModel):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class Health(BaseModel):
    """Answer of /health."""

    status: str
    model: str


class ToggleAnswer(BaseModel):
    """A toggle: its value now, what it takes and what it does here."""

    value: Any
    doc: str
    kind: str
    choices: list[str]
    minimum: float | None
    maximum: float | None
    default: Any
    off: Any
    cost: str
    lossless: bool
    effect: str


class FallbackAnswer(BaseModel):
    """Something that was asked for and cannot be had."""

    feature: str
    reason: str


class OptimizationsAnswer(BaseModel):
    """Answer of GET /v1/optimizations."""

    optimizations: dict[str, ToggleAnswer]
    fallbacks: list[FallbackAnswer]


class FieldAnswer(BaseModel):
    """What became of one change."""

    status: str
    value: Any
    reason: str


class ApplyAnswer(BaseModel):
    """Answer of PATCH /v1/optimizations."""

    ok: bool
    results: dict[str, FieldAnswer]
    build_ms: float
    swap_ms: float


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of error answers."""
    return {status: {"model": ErrorAnswer, "description": TYPES[status].replace("_", " ")} for status in statuses}


GUARDED = errors(401, 503)  # of everything behind the gate
BODY = errors(400, 404, 408, 413, 415)  # of everything that takes a body
BUSY = errors(429, 500, 504)  # of everything that generates
STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
METRICS: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
ROUTING: dict[str, Any] = {  # headers of everything that generates
    "parameters": [
        {
            "name": "X-Strata-Precision", "in": "header", "required": False, "schema": {"type": "string"},
            "description": "Which of several engines answers; one of those that GET /v1/models lists.",
        },
        {
            "name": "X-Strata-Priority", "in": "header", "required": False,
            "schema": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
            "description": "The field priority, for callers who cannot change their bodies.",
        },
    ]
}  # fmt: skip
