"""Makes a drafter: an n-gram look-up, or a model read from a checkpoint.

The target's builder calls it with what was asked for; it reads no toggle. A draft model gets a small engine's parts
(weights, pool, captured step) and no loop: its steps are run by `DraftModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from strata_lab.block_manager import BlockManager
from strata_lab.capture import Recorder
from strata_lab.config import EngineConfig, Optimizations
from strata_lab.device_sampling import GpuSampling
from strata_lab.models.checkpoint import Checkpoint
from strata_lab.models.draft_part import FEATURES, PROBE, DraftPart, state_mark
from strata_lab.prefix_cache import PrefixCache
from strata_lab.quant.base import LinearWeight
from strata_lab.run_ahead import RunAhead
from strata_lab.runner import EagerStep, Runner, Step, StepInputs
from strata_lab.settings import ConfigError
from strata_lab.speculative.ahead import AheadDrafter, DraftAhead
from strata_lab.speculative.cycles import Cycles
from strata_lab.speculative.draft_model import DraftModel
from strata_lab.speculative.feature_draft import FeatureDraft
from strata_lab.speculative.feature_step import FeatureStep, RowWeights
from strata_lab.speculative.guesses import FeatureGuesses, Guesses, TokenGuesses
from strata_lab.speculative.look_up import LookUp, LookUpGuesses
from strata_lab.speculative.policy import DraftPolicy
from strata_lab.speculative.speculator import DraftTimes, Hear, Speculator, no_hearing
from strata_lab.speculative.timing import measured_costs, time_ms

NORM = "model.norm.weight"
MAX_DRAFT_BLOCKS = 4096  # of a draft model's pool: 65,536 tokens in blocks of 16; requests beyond go without guesses


def speculator(
    drafter: Any, step: Step, runner: Runner | RunAhead, most: int, recorder: Callable[[], Recorder]
) -> Speculator:
    """A drafter with its policy, which knows what steps of the target cost.

    Args:
        drafter: makes the guesses.
        step: the target's, to be timed.
        runner: what runs it; where it decodes ahead of the host, drafts are made ahead as well.
        most: guesses per request and step.
        recorder: makes one that captures here.
    """
    if isinstance(runner, RunAhead):
        return _ahead(drafter if isinstance(drafter, DraftModel) else LookUp(), runner, most, recorder())
    costs = measured_costs(step, runner.block_size, runner.device)
    times = DraftTimes(drafter.first_ms()) if drafter.costs_time else None
    draft_ms: Callable[[int], float] = times or (lambda count: 0.0)
    policy = DraftPolicy(costs, drafter.classes, most, draft_ms)
    return Speculator(drafter, policy, most, times, hear=listener(drafter))


def _ahead(model: DraftModel | LookUp, runner: RunAhead, most: int, recorder: Recorder) -> Speculator:
    guesses = _guesses(model, runner)
    num_logits = guesses.model.weights.head.shape[0]
    sampling = GpuSampling(runner.block_size, num_logits, runner.device)
    to_target = model.to_target if isinstance(model, DraftModel) else None
    cycles = Cycles(runner, guesses, sampling, to_target, sampling.windows, recorder, most)
    drafter = AheadDrafter(model)
    policy = DraftPolicy(cycles.costs(), drafter.classes, most)
    return Speculator(drafter, policy, most, runner=DraftAhead(runner, model, cycles), hear=listener(model))


def listener(drafter: Any) -> Hear:
    """What wants to know of the target's steps."""
    return drafter.hear if isinstance(drafter, FeatureDraft) else no_hearing


def _guesses(model: DraftModel | LookUp, runner: RunAhead) -> Guesses:
    if isinstance(model, LookUp):
        from strata_lab.kernels.gpu.look_up import LOOK_UPS  # here: a CPU needs no Triton

        return LookUpGuesses(runner.eager.model, LOOK_UPS)
    if isinstance(model, FeatureDraft):
        from strata_lab.kernels.gpu.follow_rows import place_rows

        return FeatureGuesses(model, place_rows)
    step = getattr(model.step, "eager", model.step)
    assert isinstance(step, EagerStep), type(step)
    return TokenGuesses(step)


def num_draft_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks of a draft model's pool: what all requests could fill, within reason."""
    return min(max_num_seqs * -(-max_model_len // block_size), MAX_DRAFT_BLOCKS)


def draft_config(name: str, target: EngineConfig, device: torch.device, num_blocks: int) -> EngineConfig:
    """What a draft model is made with: the target's ways, a pool of its own."""
    return EngineConfig(
        model=name, device=str(device), dtype=target.dtype, block_size=target.block_size, seed=target.seed,
        num_kv_blocks=num_blocks,
    )  # fmt: skip


def shared_vocabulary(name: str, draft: Checkpoint, target: Checkpoint) -> DraftPart | None:
    """How a draft's tokens become the target's: None for a draft model that speaks them itself.

    Raises:
        ConfigError: it speaks other tokens, or was trained for another model.
    """
    part: DraftPart | None = getattr(draft, "draft", None)
    tokenizers = draft.tokenizer() if part is None else None, target.tokenizer()
    split, target_split = (None if t is None else tuple(t.encode(PROBE)) for t in tokenizers)
    vocab_size = draft.config.vocab_size
    if part is not None:
        split, vocab_size = part.probe, part.vocab_size
        if draft.config.hidden_size != target.config.hidden_size:
            raise ConfigError(
                f"draft_model={name!r} was trained for {part.target}, {draft.config.hidden_size} wide, and the model "
                f"is {target.config.hidden_size} wide; train one with strata train-draft, or try speculative='ngram'"
            )
        seen = state_mark(target.tensor(NORM)), target.config.num_layers
        if part.kind == FEATURES and (part.mark, part.seen[-1]) != seen:
            raise ConfigError(
                f"draft_model={name!r} sees the states of {part.target}, and the model is another one of the same "
                "width; train one with strata train-draft --kind features, or try speculative='ngram'"
            )
    if vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"draft_model={name!r} has {vocab_size} tokens and the model has {target.config.vocab_size}: guesses must "
            "be tokens of the model; try a smaller model of the same family, or speculative='ngram'"
        )
    if None not in (split, target_split) and split != target_split:
        raise ConfigError(
            f"draft_model={name!r} splits text into other tokens than the model; try a smaller model of the same "
            "family, or speculative='ngram'"
        )
    return part


def model_drafter(
    builder: Any, name: str, target: Checkpoint, embedding: LinearWeight, kv_cache_dtype: str | None
) -> DraftModel:
    """A draft model on a pool of its own, with the time of one of its steps.

    Args:
        builder: of the draft model; it is made with default toggles.
        name: of the draft model.
        target: the model that it guesses for.
        embedding: of the target.
        kv_cache_dtype: as of the target.
    """
    part = shared_vocabulary(name, builder.checkpoint, target)
    builder.embedding = embedding if part else None
    sees = part is not None and part.kind == FEATURES
    wish = Optimizations(kv_cache_dtype=kv_cache_dtype, cuda_graph=not sees)  # its steps of the host are few
    parts = builder.parts(builder.resolve(wish))
    runner = parts.runner.runner if isinstance(parts.runner, RunAhead) else parts.runner
    blocks = BlockManager(parts.kv.num_blocks, runner.block_size, PrefixCache(runner.block_size))
    inputs = StepInputs.idle(1, 2, builder.device)
    plain = partial(runner.step, inputs)
    if part is None:
        return _timed(DraftModel(runner.step, blocks, builder.device, name), plain)
    to_target = torch.tensor(part.to_target, dtype=torch.int64, device=builder.device)
    rest = blocks, builder.device, name, to_target, part.vocab_size
    if not sees:
        return _timed(DraftModel(runner.step, *rest), plain)
    assert isinstance(runner.step, EagerStep)
    layers_format = parts.weights.layers[0].attention.qkv.format
    step = FeatureStep(runner.step, RowWeights.read(builder.reader(layers_format), len(part.seen)))
    made = FeatureDraft(step, *rest)
    if builder.device.type == "cuda":
        made.warm_up(builder.progress)
    return _timed(made, lambda: step.model.logits(step.further(inputs, step.no_states(1))))


def _timed(drafter: DraftModel, step: Callable[[], Any]) -> DraftModel:
    with torch.inference_mode():
        step()
        drafter.step_ms = time_ms(step, drafter.device)
    return drafter
