"""Load at a click: the requests of the articles' workloads, a long prompt, users that join."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from strata_lab.bench.workloads import ARTICLE_WORKLOADS, Workload
from strata_lab.sampling_params import SamplingParams
from strata_lab.workbench.lanes import Lane

LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS = 2048, 32
NUM_USERS = 4
USER = Workload("users", f"{NUM_USERS} users more: 64 tokens in, 192 out each", 64, (192,) * NUM_USERS, NUM_USERS)
LONG = Workload(
    "long prompt",
    f"{LONG_PROMPT_TOKENS} tokens in, {LONG_OUTPUT_TOKENS} out",
    LONG_PROMPT_TOKENS,
    (LONG_OUTPUT_TOKENS,),
)
_LOADS = {
    **{letter: (f"Article {letter}", workload) for letter, workload in ARTICLE_WORKLOADS.items()},
    "long": ("+ long prompt", LONG),
    "users": (f"+ {NUM_USERS} users", USER),
}
NAMES = tuple(_LOADS)


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load.

    Attributes:
        title: of its lane.
        prompt: token ids.
        params: how to sample.
    """

    title: str
    prompt: list[int]
    params: SamplingParams


def load_data() -> list[dict[str, str]]:
    """The buttons, as `LoadPanel.loads` takes them."""
    return [{"name": name, "label": label, "tip": _tip(workload)} for name, (label, workload) in _LOADS.items()]


def _tip(workload: Workload) -> str:
    return (
        f"{workload.doc[0].upper()}{workload.doc[1:]}. The end token is ignored, so that every run does the same work."
    )


def label(name: str) -> str:
    """What its button says."""
    return _LOADS[name][0].removeprefix("+ ")


def load_requests(name: str, engine: Any) -> list[LoadRequest]:
    """The requests of a load.

    A prompt that is longer than the engine's `max_model_len` allows is refused by the engine, in words; the long prompt
    takes what fits.

    Raises:
        ValueError: there is no load of that name.
    """
    if name not in _LOADS:
        raise ValueError(f"there is no load {name!r}; there are {', '.join(NAMES)}")
    workload = _LOADS[name][1]
    if name == "long":
        room = (engine.optimizations.max_model_len or LONG_PROMPT_TOKENS) - LONG_OUTPUT_TOKENS - 1
        workload = replace(workload, prompt_tokens=max(1, min(LONG_PROMPT_TOKENS, room)))
    prompts = workload.prompts(engine.tokenizer, engine.model_config.vocab_size)
    titles = [label(name)] if len(prompts) == 1 else [f"{label(name)} · {i + 1}" for i in range(len(prompts))]
    return [
        LoadRequest(title, prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        for title, prompt, length in zip(titles, prompts, workload.output_tokens, strict=True)
    ]


def send(engine: Any, requests: list[tuple[Any, SamplingParams, Lane]]) -> None:
    """Queue one request per lane; when one cannot be served, none is left running."""
    for i, (message, params, lane) in enumerate(requests):
        lane.sent_s = time.perf_counter()
        try:
            engine.add_request(message, params, request_id=lane.request_id)
        except Exception:
            for _, _, sent in requests[:i]:
                engine.abort(sent.request_id)
            raise
