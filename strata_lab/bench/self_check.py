"""What a quantized checkpoint says, beside what its source says: the numbers of `strata validate --deep`.

Perplexity, KL and top-1 agreement on the project's own evaluation text, one comparison per language; then fixed prompts
answered by both through the engine, greedily, so that a reader can judge for himself. Flags are for what no mean shows:
a text that goes in circles, or ends far too early.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata_lab.quant.quality import Comparison, compare

WINDOW = 256  # tokens of a sequence that is compared
ANSWER_TOKENS = 64
MODEL_LEN = 512  # tokens of a prompt with its answer, where the model has as many positions
LONGEST_CYCLE, CYCLES = 16, 4  # a text that ends with so many copies of so few tokens goes in circles
SHORT = 0.5  # of the source's answer: one that ends earlier was cut off
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who is afraid of the dark.",
    "List three fruits and one vegetable.",
    "Write a Python function that returns the largest of three numbers.",
    "法国的首都是哪里?",
    "用两句话解释为什么天空是蓝色的。",
    "写一首关于秋天的短诗。",
)
_CHINESE = re.compile(r"[\u4e00-\u9fff]")

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Answer:
    """One prompt, answered twice.

    Attributes:
        prompt: what was asked.
        source, candidate: the two texts.
        divergence: number of the first token that differs; None if none does.
        flags: what is wrong with the candidate's, in words.
    """

    prompt: str
    source: str
    candidate: str
    divergence: int | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class SelfCheck:
    """All of it.

    Attributes:
        source, candidate: what was compared.
        languages: "English", "Chinese" to the comparison on its text.
        answers: in the order of `PROMPTS`.
    """

    source: str
    candidate: str
    languages: dict[str, Comparison]
    answers: tuple[Answer, ...]

    @property
    def flags(self) -> list[str]:
        """What a reader should look at first."""
        return [f"{flag}: {a.prompt!r}" for a in self.answers for flag in a.flags]


def self_check(source: str, candidate: str, progress: Progress = lambda text, done: None) -> SelfCheck:
    """Compare two models that share a tokenizer.

    Args:
        source, candidate: names or paths, as the engine takes them; both are held in float32 for the comparison.
        progress: called with what is done and the fraction done.

    Raises:
        CheckpointError: one cannot be opened, or their vocabularies differ.
    """
    from strata_lab.models.errors import CheckpointError
    from strata_lab.models.loader import open_checkpoint
    from strata_lab.quant.forward import sequence_logits

    first, second = open_checkpoint(source), open_checkpoint(candidate)
    try:
        if first.config.vocab_size != second.config.vocab_size:
            raise CheckpointError(
                f"{candidate} has a vocabulary of {second.config.vocab_size}, {source} of {first.config.vocab_size}: "
                "they cannot be compared; give the model it was made from"
            )
        tokenizer = first.tokenizer()
        if tokenizer is None:
            raise CheckpointError(f"{source} has no tokenizer, so there is no text to compare on; use one that has")
        progress("loading both models", 0.0)
        both = sequence_logits(first), sequence_logits(second)
        most, languages = min(first.config.max_position, second.config.max_position), {}
        length = min(WINDOW, most)
        for count, (language, text) in enumerate(texts().items()):
            progress(f"perplexity, {language}", 0.1 + 0.3 * count)
            ids = tokenizer.encode(text)
            languages[language] = compare(*both, [ids[i : i + length] for i in range(0, len(ids), length)])
        del both
    finally:
        first.close()
        second.close()
    answers = _answers(source, candidate, min(MODEL_LEN, most), progress)
    progress("done", 1.0)
    return SelfCheck(source, candidate, languages, answers)


def texts() -> dict[str, str]:
    """The evaluation text by language."""
    from strata_lab.quant.texts import text

    found: dict[str, list[str]] = {"English": [], "Chinese": []}
    for part in text("evaluation").split("\n---\n"):
        chinese = len(_CHINESE.findall(part)) > len(part) / 5
        found["Chinese" if chinese else "English"].append(part.strip())
    return {language: "\n\n".join(parts) for language, parts in found.items() if parts}


def _answers(source: str, candidate: str, max_model_len: int, progress: Progress) -> tuple[Answer, ...]:
    said: list[list[tuple[list[int], str, bool]]] = []
    for count, model in enumerate((source, candidate)):
        progress(f"answers of {model}", 0.6 + 0.2 * count)
        said.append(_ask(model, max_model_len))
    found = []
    for prompt, (ids, text, ended), (other, other_text, other_ended) in zip(PROMPTS, *said, strict=True):
        flags = flags_of(other, len(ids), ended, other_ended)
        found.append(Answer(prompt, text, other_text, divergence(ids, other), flags))
    return tuple(found)


def _ask(model: str, max_model_len: int) -> list[tuple[list[int], str, bool]]:
    """Token ids, text and whether it ended by itself, for every prompt."""
    from strata_lab.engine import LLMEngine
    from strata_lab.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    with LLMEngine(model, max_model_len=max_model_len, max_num_seqs=len(PROMPTS)) as engine:
        chat = engine.tokenizer is not None and engine.tokenizer.chat_template is not None
        wishes = [[{"role": "user", "content": p}] if chat else p for p in PROMPTS]
        return [(list(r.token_ids), r.text, r.finish_reason == "stop") for r in engine.generate(wishes, params)]


def divergence(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """Number of the first token in which two greedy texts differ; None if they are equal."""
    for i in range(max(len(ids), len(other))):
        if i >= len(ids) or i >= len(other) or ids[i] != other[i]:
            return i
    return None


def flags_of(ids: Sequence[int], source_length: int, source_ended: bool, ended: bool) -> tuple[str, ...]:
    """What is wrong with a text of token ids, next to one of `source_length` tokens."""
    flags = []
    for cycle in range(1, LONGEST_CYCLE + 1):
        tail = list(ids[-cycle * CYCLES :])
        if len(tail) == cycle * CYCLES and tail == tail[:cycle] * CYCLES:
            flags.append(f"repeats its last {'token' if cycle == 1 else f'{cycle} tokens'}")
            break
    if ended and len(ids) < SHORT * source_length:
        flags.append(f"ends after {len(ids)} tokens, its source after {source_length}")
    if source_ended and not ended:
        flags.append("does not come to an end")
    return tuple(flags)
