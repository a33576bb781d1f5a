"""Turns what callers pass into sessions; every mistake becomes a `RequestError` before anything is queued.

It runs in the caller's thread: tokenizing, compiling a structure and rendering a chat cost the engine nothing.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from strata_lab.choices import choice_params, other_choices
from strata_lab.detokenizer import Detokenizer
from strata_lab.grammar import Grammars
from strata_lab.model_config import ModelConfig
from strata_lab.prompt_embeds import checked, placeholder_ids
from strata_lab.request import Request, check_token_ids
from strata_lab.sampling_params import RequestError, SamplingParams
from strata_lab.session import Inbox, Session

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class Intake:
    """Makes the sessions of one engine.

    Args:
        tokenizer: None for a model without one, which then takes token ids only.
        config: of the model.
        device: where it computes.
        on_done: called with every request whose text is complete.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: ModelConfig,
        device: torch.device,
        on_done: Callable[[Request], None] | None = None,
    ) -> None:
        self.tokenizer, self.config, self.device, self._on_done = tokenizer, config, device, on_done
        tokenizer_eos = tuple(tokenizer.eos_token_ids) if tokenizer is not None else ()
        self.eos_token_ids = frozenset(config.eos_token_ids) | frozenset(tokenizer_eos)
        self._grammars = Grammars(tokenizer, config.vocab_size, self.eos_token_ids)

    def session(
        self,
        prompt: Prompt | None,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        prompt_embeds: Any = None,
        inbox: Inbox | None = None,
    ) -> Session:
        """A session for one prompt, with those of its other texts in its `group`.

        Args:
            prompt, params, request_id, priority, prompt_embeds: as `LLMEngine.add_request` takes them.
            inbox: gets the events.

        Raises:
            RequestError: whatever is wrong with them.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params={params!r} must be a SamplingParams; try SamplingParams(max_tokens=64)"
            )
        if (prompt is None) == (prompt_embeds is None):
            raise RequestError(
                "give a prompt or prompt_embeds, one of them; for both, put embed(tokens) beside the rows"
            )
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority={priority!r} must be a whole number; try 0, or 1 to go before others")
        if prompt is not None:
            text, token_ids = self._tokens(prompt)
            token_ids = check_token_ids(token_ids, self.config.vocab_size)
        else:
            prompt_embeds = checked(prompt_embeds, self.config.hidden_size, self.device)
            text, token_ids = "", placeholder_ids(len(prompt_embeds))
            _check_without_tokens(params)
        wish = params.structured_outputs
        for token_id in (*params.logit_bias, *params.stop_token_ids):
            check_token_ids([token_id], self.config.vocab_size)
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise RequestError(
                "stop strings and bad_words need a tokenizer and this model has none; use stop_token_ids, or "
                "logit_bias={id: -100}"
            )
        request = Request(
            request_id=request_id or f"r-{uuid.uuid4().hex[:12]}",
            prompt_token_ids=token_ids,
            params=choice_params(params),
            seed=params.seed if params.seed is not None else secrets.randbits(62),
            priority=priority,
            arrival_s=time.perf_counter(),
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids),
            bad_words=self._bad_words(params.bad_words),
            grammar=None if wish is None else self._grammars.compiled(wish),
            prompt_embeds=prompt_embeds,
        )
        first = Session(request, text, self._detokenizer(request), params, inbox=inbox)
        for other in other_choices(request):
            Session(other, text, self._detokenizer(other), params, first, inbox)
        for session in first.group:
            session.on_done = self._on_done
        return first

    def compile(self, params: SamplingParams) -> None:
        """Compile the structure that `params` ask for, so that a later `session` finds it ready."""
        if params.structured_outputs is not None:
            self._grammars.compiled(params.structured_outputs)

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        context = request.prompt_token_ids if request.prompt_embeds is None else []
        return Detokenizer(self.tokenizer, context, request.params)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokens of each word, alone and after a space where that gives others."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                found[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return tuple(ids for ids in found if ids)

    def _tokens(self, prompt: Prompt) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("prompt='' is empty; give at least one character, for example 'Hello'")
            return prompt, self._need_tokenizer("text").encode(prompt)
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return "", self._need_tokenizer("chat messages").apply_chat_template(items)
        return "", items

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"the prompt is {what} but this model has no tokenizer; give token ids, such as [1, 2, 3]"
            )
        return self.tokenizer

    def pair(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] = 0,
    ) -> list[tuple[Prompt, SamplingParams, int]]:
        """Prompts with their params and priorities, whichever of them is single."""
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        one = params is None or isinstance(params, SamplingParams)
        return list(
            zip(
                many,
                _each(params or SamplingParams(), one, len(many), "sampling_params"),
                _each(priority, not isinstance(priority, Sequence), len(many), "priorities"),
                strict=True,
            )
        )


def _each(value: Any, is_one: bool, count: int, what: str) -> list[Any]:
    """One value for all prompts, or one per prompt."""
    values = [value] * count if is_one else list(value)
    if len(values) != count:
        raise RequestError(f"{count} prompts but {len(values)} {what}; give one, or one per prompt")
    return values


def _check_without_tokens(params: SamplingParams) -> None:
    """Refuse what looks at the prompt's tokens, where it has embeddings in their place."""
    if params.repetition_penalty != 1:
        raise RequestError(
            f"repetition_penalty={params.repetition_penalty} looks at the prompt's tokens, and embeddings have none; "
            "try presence_penalty"
        )
    if params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs={params.prompt_logprobs} are of the prompt's tokens, and embeddings have none; try "
            "logprobs, which are of the output's"
        )


def _is_one(prompts: Any) -> bool:
    """A text, a list of token ids or a conversation is one prompt; any other list holds several."""
    if isinstance(prompts, str):
        return True
    items = list(prompts)
    return bool(items) and isinstance(items[0], int | Mapping)
