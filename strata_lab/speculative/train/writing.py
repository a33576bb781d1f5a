"""What the target writes before a draft is trained, by our own engine: texts to learn from, answers to measure with.

The answers are those to the questions of the bench's chats (`questions.txt`), greedy ones: nobody learns from them, and
what a draft guesses there is what the bench will see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata_lab.models.loader import open_model
from strata_lab.resolve import device_named
from strata_lab.sampling_params import SamplingParams
from strata_lab.speculative.traffic import Text, TrafficFile
from strata_lab.speculative.train.making import before_loop, make_texts
from strata_lab.speculative.train.prompts import own_texts, prompts, read_questions, read_seeds, user_turn
from strata_lab.speculative.train.settings import TRAFFIC_SUFFIX, Recipe
from strata_lab.speculative.train.training import Progress

STREAMS = {"cpu": 16, "cuda": 128}  # requests at the same time: what the steps are fastest with
BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}  # of a step that computes prompts
PROMPT_TOKENS = 256  # room for a prompt
KV_BLOCK = 16


def write_texts(recipe: Recipe, path: Path, tokens: int, seed: int, progress: Progress) -> None:
    """Have the target write `tokens` into a file, behind what is there."""
    with _engine(recipe, recipe.streams or STREAMS[device_named(recipe.device).type], progress) as engine:
        tokenizer = engine.tokenizer
        own = own_texts([p for p in recipe.data if p.suffix != TRAFFIC_SUFFIX], tokenizer)
        chats = tokenizer is not None and tokenizer.chat_template is not None
        turn = user_turn(tokenizer) if chats else None
        asked = prompts(seed, read_seeds(), chats=chats, own=own, tokenizer=tokenizer, turn=turn)
        output = min(recipe.output_tokens, engine.model_config.max_position // 2)
        target = TrafficFile(path)
        try:
            make_texts(
                engine, asked, target, tokens=tokens, seconds=recipe.make_seconds, output_tokens=output, seed=seed,
                progress=progress,
            )  # fmt: skip
        finally:
            target.close()


def write_answers(recipe: Recipe, path: Path, progress: Progress) -> None:
    """Have the target answer the bench's questions greedily, each up to where it goes round in circles."""
    asked = [[{"role": "user", "content": question}] for question in read_questions()]
    progress("answers to measure with, written by the target", 0.0)
    with _engine(recipe, len(asked), progress) as engine:
        output = min(recipe.output_tokens, engine.model_config.max_position // 2)
        outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=output))
    target = TrafficFile(path)
    for one in outputs:
        target.add(Text(one.prompt_token_ids, before_loop(one.token_ids), 0.0))
    target.close()


def _engine(recipe: Recipe, streams: int, progress: Progress) -> Any:
    from strata_lab.engine import LLMEngine

    kind = device_named(recipe.device).type
    checkpoint = open_model(recipe.target)
    longest = min(PROMPT_TOKENS + recipe.output_tokens, checkpoint.config.max_position)
    checkpoint.close()
    options: dict[str, Any] = {
        "device": kind, "max_num_seqs": streams, "max_num_batched_tokens": BATCHED_TOKENS[kind], "seed": recipe.seed,
        "num_kv_blocks": streams * -(-longest // KV_BLOCK), "block_size": KV_BLOCK, "max_model_len": longest,
        "continuous_batching": kind == "cpu",  # a GPU queues steps ahead while nobody joins: all begin together
    }  # fmt: skip
    return LLMEngine(recipe.target, on_progress=progress, **options)
