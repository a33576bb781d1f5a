"""What callers may send: one model per body, strict, with no field that is ignored in silence.

Fields of `SamplingParams` are taken over by name, type and text, so that a new one is a new field here. Bounds are
checked where the engine checks them (`SamplingParams`), which gives the better message. What answers look like is in
`replies.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import attribute_docs

# A field of SamplingParams with one of these types becomes a field of every generating body.
_PLAIN = {
    float: float, int: int, bool: bool, float | None: float, int | None: int,
    tuple[str, ...]: list[str] | str, tuple[int, ...]: list[int],
}  # fmt: skip
# Those with a name or a type of their own in OpenAI's bodies; `translate` maps them one by one.
SHAPED = {"logprobs", "max_tokens", "best_of", "logit_bias", "structured_outputs"}
GUIDED = {  # vLLM's older names for `structured_outputs`
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
# OpenAI's fields that have no meaning here: accepted, since its clients send them, and named in the answer.
INERT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip


class Strict(BaseModel):
    """Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _sampling_fields() -> dict[str, Any]:
    docs, hints = attribute_docs(SamplingParams), typing.get_type_hints(SamplingParams)
    made: dict[str, Any] = {}
    for f in dataclasses.fields(SamplingParams):
        kind = _PLAIN.get(hints[f.name])
        if kind is not None and f.name not in SHAPED | {"n"}:
            made[f.name] = (kind | None, Field(None, description=docs[f.name]))
    return made


class _Generating(Strict):
    model: str | None = Field(None, description="One of GET /v1/models; may be left out.")
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="Answers per prompt.")
    stream: bool | None = Field(None, description="Send tokens as they come, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id to a number added to its logit.")
    max_tokens: int | None = Field(None, description="Most tokens to generate.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="Higher goes first, under scheduling_policy=priority (vLLM counts the other way round)."
    )
    structured_outputs: StructuredFields | None = Field(None, description="What shape the text must have.")
    guided_json: dict[str, Any] | str | None = Field(None, description="structured_outputs.json by its older name.")
    guided_regex: str | None = Field(None, description="structured_outputs.regex by its older name.")
    guided_choice: list[str] | None = Field(None, description="structured_outputs.choice by its older name.")
    guided_grammar: str | None = Field(None, description="structured_outputs.grammar by its older name.")
    user: str | None = Field(None, description="No effect; named in the answer's warnings.")
    metadata: dict[str, str] | None = Field(None, description="No effect; named in the answer's warnings.")
    store: bool | None = Field(None, description="No effect; named in the answer's warnings.")
    service_tier: str | None = Field(None, description="No effect; named in the answer's warnings.")
    safety_identifier: str | None = Field(None, description="No effect; named in the answer's warnings.")
    prompt_cache_key: str | None = Field(None, description="No effect; named in the answer's warnings.")
    prompt_cache_retention: str | None = Field(None, description="No effect; named in the answer's warnings.")


class StructuredFields(Strict):
    """What shape the text must have: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="The text is a full match.")
    choice: list[str] | None = Field(None, description="The text is one of these.")
    grammar: str | None = Field(None, description="EBNF (GBNF of llama.cpp) that begins with the rule root.")


class StreamOptions(Strict):
    """What a stream carries beside its text."""

    include_usage: bool | None = Field(None, description="A last piece with the numbers of tokens.")


Generating: Any = create_model("Generating", __base__=_Generating, **_sampling_fields())

TokenIds = list[int]


class CompletionRequest(Generating):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds] | None = Field(
        None, description="Text, token ids, or a list of either; required without prompt_embeds."
    )
    prompt_embeds: str | Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="In place of a prompt: base64 of a safetensors or NumPy file of [tokens, hidden].",
    )
    logprobs: int | None = Field(None, description="Alternatives per token whose log probabilities are returned.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    best_of: int | None = Field(None, description="Generate that many, return the n most likely per token.")
    suffix: str | None = Field(None, description="Not supported.")
    response_format: ResponseFormat | None = Field(None, description="Text, any JSON object, or JSON of a schema.")


class GenerateRequest(Generating):
    """Body of POST /generate."""

    prompt: str | TokenIds = Field(description="Text or token ids.")
    logprobs: int | None = Field(None, description="Alternatives per token whose log probabilities are returned.")


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A call that a model wrote."""

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(Strict):
    """One of an assistant's calls."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """Names a function."""

    name: str


class ToolChoice(Strict):
    """One function that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    """A schema the answer must follow."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Generating):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(description="The conversation.")
    max_completion_tokens: int | None = Field(None, description="Most tokens to generate; max_tokens is its old name.")
    logprobs: bool | None = Field(None, description="Return log probabilities of the tokens.")
    top_logprobs: int | None = Field(None, description="Alternatives per token, with logprobs.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description="auto: the model decides; none; required: some function; or a named one."
    )
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first call only.")
    response_format: ResponseFormat | None = Field(None, description="Text, any JSON object, or JSON of a schema.")


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = Field(None, description="What the model wants around every text; default true.")
    return_token_strs: bool | None = Field(None, description="Each token's text too.")


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


for _model in (CompletionRequest, GenerateRequest, ChatRequest):
    _model.model_rebuild()

BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest, GenerateRequest, ChatRequest, Message, Tool, FunctionDefinition, ToolChoice, ResponseFormat,
    JsonSchema, StreamOptions, StructuredFields, TokenizeRequest, DetokenizeRequest,
)  # fmt: skip


def known_fields() -> dict[str, list[str]]:
    """Body to the names of its fields, as callers write them."""
    return {m.__name__: [f.alias or name for name, f in m.model_fields.items()] for m in BODIES}
