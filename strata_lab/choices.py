"""Several texts of one prompt: what each is asked for, and which of them are kept. Torch-free.

The first is an ordinary request. The others begin when its prompt is computed, sharing its KV blocks
(`EngineLoop`, decision 0014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strata_lab.request import Request, RequestOutput
from strata_lab.sampling_params import SamplingParams
from strata_lab.sampling_random import child_seed


def choice_params(params: SamplingParams) -> SamplingParams:
    """What each text is sampled by: to find the best ones, their log probabilities are needed."""
    ranked = params.num_choices > params.n and params.logprobs is None
    return replace(params, logprobs=0) if ranked else params


def choice_ids(request_id: str, count: int) -> list[str]:
    """Names of the requests of one prompt's texts."""
    return [request_id, *(f"{request_id}-{index}" for index in range(1, count))]


def other_choices(first: Request) -> list[Request]:
    """The requests beside the first one; text i is what a request of `child_seed(seed, i)` would give."""
    params = first.params
    if params.num_choices == 1:
        return []
    params = replace(params, prompt_logprobs=None)  # the first one's are everybody's
    return [
        Request(
            request_id=name,
            prompt_token_ids=first.prompt_token_ids,
            params=params,
            seed=child_seed(first.seed, index),
            priority=first.priority,
            arrival_s=first.arrival_s,
            stop_ids=first.stop_ids,
            bad_words=first.bad_words,
            grammar=first.grammar,
            prompt_embeds=first.prompt_embeds,
        )
        for index, name in enumerate(choice_ids(first.request_id, params.num_choices)[1:], 1)
    ]


def together(outputs: Sequence[RequestOutput], asked: SamplingParams) -> RequestOutput:
    """One output of several, as `asked`: the first of those that are kept, the rest in `others`.

    With `best_of` the n of the highest mean log probability, best first; a text without tokens comes last.
    """
    kept = list(outputs)
    if asked.num_choices > asked.n:
        kept = sorted(kept, key=_mean_logprob, reverse=True)[: asked.n]
    if asked.logprobs is None:
        kept = [replace(output, logprobs=()) for output in kept]
    shared = outputs[0].prompt_logprobs
    first, *others = (replace(output, index=i, prompt_logprobs=shared) for i, output in enumerate(kept))
    return replace(first, others=tuple(others))


def _mean_logprob(output: RequestOutput) -> float:
    total = output.cumulative_logprob
    return float("-inf") if total is None else total / len(output.logprobs)
