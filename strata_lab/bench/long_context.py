"""What a window and a choice of pages cost in quality, and what they save: perplexity, KL, bytes, memory and speed.

`python -m strata_lab.bench.long_context` reads two long texts with full attention and with each setting and compares
the predictions, in plain float32 through the reference operators. "rotated" is the other way to do it, which the engine
does not: sinks stand just before the window, as if what lies between had never been there
(docs/decisions/0016-long-context.md). With "pages:N" every token of the texts is read as one of an answer. Then one
engine decodes behind a long prompt, with each setting in turn. Records that are not measured anew stay in the file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from strata_lab.bench.harness import Environment, Record, Spread, interleave, join_results
from strata_lab.bench.workloads import TEXT_FILE
from strata_lab.config import DEFAULT_MODEL
from strata_lab.events import StepEvent
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SCRIPT = "python -m strata_lab.bench.long_context"
SETTINGS = (
    "4:1024", "4:512", "4:256", "4:128", "0:256", "1:256", "16:256", "4:256:rotated", "4:512:rotated",
    "pages:64", "pages:32", "pages:16", "pages:8",
)  # fmt: skip
LENGTH = 2048  # tokens of each text
SPEED_LENGTH = 4096  # tokens of the prompt
DECODED, ROUNDS = 48, 3
OFF = {"kv_window": 0, "sparse_pages": 0}
SPEEDS: dict[str, dict[str, int]] = {
    "all": OFF, "window/1024": OFF | {"kv_window": 1024}, "window/256": OFF | {"kv_window": 256},
    "pages/64": OFF | {"sparse_pages": 64}, "pages/16": OFF | {"sparse_pages": 16},
}  # fmt: skip
PAGES = "pages:"


def attention(setting: str, theta: float) -> Callable[..., Tensor]:
    """The operator of a setting "SINKS:WINDOW", "SINKS:WINDOW:rotated" or "pages:N"."""
    from strata_lab.kernels.paged_attention import paged_attention_ref

    if setting.startswith(PAGES):
        return partial(answer_attention, pages=int(setting.removeprefix(PAGES)))
    sinks, window, *way = setting.split(":")
    if way:
        return partial(rotated_attention, sinks=int(sinks), window=int(window), theta=theta)
    return partial(paged_attention_ref, sinks=int(sinks), window=int(window))


def answer_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    *, pages: int, **scales: Any,
) -> Tensor:  # fmt: skip
    """`sparse_attention_ref` of one whole text in blocks from 0 on that has no prompt."""
    import torch

    from strata_lab.kernels.page_bounds import page_bounds_ref
    from strata_lab.kernels.sparse_attention import sparse_attention_ref

    blocks, size, heads, width = k_cache.shape
    bounds = k_cache.new_zeros((blocks, heads, 2, width))
    page_bounds_ref(k_cache, bounds, torch.arange(blocks * size, device=q.device))
    read = (k_cache, v_cache, bounds, block_tables, seq_lens, cu_seqlens_q, torch.zeros_like(seq_lens))
    return sparse_attention_ref(q, *read, pages=pages, **scales)


def rotated_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    *, max_q_len: int, scale: float, k_scale: float, v_scale: float, sinks: int, window: int, theta: float,
) -> Tensor:  # fmt: skip
    """`paged_attention_ref` of one whole text whose queries stand at most `sinks + window - 1` behind the sinks.

    A query meets its window at the distances there are, and the sinks as if it stood right behind a full window.
    """
    import torch

    from strata_lab.kernels.rope import rope_ref, rotation

    length, heads, width = q.shape
    positions = torch.arange(length, device=q.device)
    back = (positions - (sinks + window - 1)).clamp(min=0)
    cos, sin = rotation(back, width, theta)
    table = block_tables[0].long()
    k, v = (cache[table].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
    ahead, behind = positions[:, None], positions[None, :]
    sunk, near = (behind < sinks) & (behind <= ahead), (behind <= ahead) & (ahead - behind < window)
    out = torch.empty_like(q)
    moved = rope_ref(q, cos, -sin)
    for head in range(heads):
        own = head * k.shape[1] // heads
        scores = torch.where(near, q[:, head] @ k[:, own].T, moved[:, head] @ k[:, own].T) * (scale * k_scale)
        weights = scores.masked_fill(~(near | sunk), -torch.inf).softmax(dim=-1)
        out[:, head] = weights @ v[:, own] * v_scale
    return out


def quality(model: str, settings: Sequence[str], length: int) -> Iterator[Record]:
    """A record per setting: what it does to the predictions of both texts."""
    import torch

    from strata_lab.models.loader import open_checkpoint
    from strata_lab.quant.forward import sequence_logits
    from strata_lab.quant.quality import compare
    from strata_lab.quant.texts import text

    environment, source = Environment.now("cpu"), open_checkpoint(model)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, so there is no text to judge by; try {DEFAULT_MODEL}")
    contents = {"evaluation": text("evaluation"), "unseen": TEXT_FILE.read_text(encoding="utf-8")}
    texts = {n: tuple(tokenizer.encode(t, add_special_tokens=False)[:length]) for n, t in contents.items()}
    with torch.inference_mode():
        plain = sequence_logits(source)
        known = {t: plain(t) for t in texts.values()}
        for setting in settings:
            theta = source.config.rope_theta
            changed = sequence_logits(source, overrides={"paged_attention": attention(setting, theta)})
            metrics: dict[str, Any] = {}
            for name, tokens in texts.items():
                found = compare(lambda t: known[tuple(t)], changed, [tokens])
                metrics |= found.figures(name)
            conditions = {"model": model, "context": length, "weights": "as stored, in float32"} | _asked(setting)
            name = setting.replace(PAGES, "pages/") if setting.startswith(PAGES) else f"window/{setting}"
            yield environment.record(name, script=SCRIPT, conditions=conditions, metrics=metrics)


def _asked(setting: str) -> dict[str, Any]:
    """What a setting says, for a record."""
    from strata_lab.quant.forward import BLOCK_SIZE

    if setting.startswith(PAGES):
        return {"sparse_pages": int(setting.removeprefix(PAGES)), "block_size": BLOCK_SIZE}
    sinks, window, *way = setting.split(":")
    return {"kv_sinks": int(sinks), "kv_window": int(window), "positions": "rotated" if way else "kept"}


def decode(engine: Any, changes: dict[str, int], prompt: list[int]) -> tuple[float, float, int]:
    """Decode behind a prompt: median milliseconds of a step, bytes it reads, most blocks that were held."""
    engine.apply(**changes)
    cursor = engine.events.cursor
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True))
    steps = [e for e in engine.events.since(cursor)[0] if isinstance(e, StepEvent)]
    decodes = [e for e in steps if not e.num_prefill_tokens][2:-1]  # the last one frees its blocks
    return (
        statistics.median(e.duration_ms for e in decodes),
        statistics.mean(e.bytes_moved for e in decodes),
        max(e.kv_blocks_used for e in decodes),
    )


def speed(model: str, length: int, device: str) -> Iterator[Record]:
    """A record per setting of `SPEEDS`: an engine that decodes behind `length` tokens, the settings in turn."""
    from strata_lab.engine import LLMEngine

    environment = Environment.now(device)
    most = length + DECODED + 1
    pool = len(SPEEDS) * -(-most // 16)  # the prefix cache then keeps the prompt as every setting computed it
    with LLMEngine(model, device=device, max_model_len=most, max_num_seqs=1, num_kv_blocks=pool) as engine:
        prompt = [(5 + 29 * i) % engine.model_config.vocab_size for i in range(length)]
        runs = interleave({name: partial(decode, engine, s, prompt) for name, s in SPEEDS.items()}, ROUNDS)
        settings, per_token, size = engine.optimizations, engine.stats().kv_bytes_per_token, engine.config.block_size
    weights = statistics.mean(read for _, read, _ in runs["all"]) - per_token * (length + DECODED / 2)
    for name, changes in SPEEDS.items():
        times, reads, blocks = zip(*runs[name], strict=True)
        metrics = {
            "step_ms": statistics.median(times), "output_tok_s": 1e3 / statistics.median(times),
            "read_bytes_per_token": statistics.mean(reads), "weight_bytes_per_token": weights,
            "kv_blocks_held": max(blocks), "kv_bytes_held": max(blocks) * per_token * size,
        }  # fmt: skip
        conditions = {"model": model, "weight_format": settings.weight_format, "batch": 1, "context": length,
                      "kv_cache_dtype": settings.kv_cache_dtype, "kv_sinks": settings.kv_sinks, "block_size": size,
                      "output_tokens": DECODED, **changes}  # fmt: skip
        yield environment.record(
            f"speed/{name}", script=SCRIPT, conditions=conditions, metrics=metrics, spread=Spread.of(times)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument(
        "--settings", nargs="*", default=list(SETTINGS), help="SINKS:WINDOW, SINKS:WINDOW:rotated or pages:N"
    )
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of each text")
    parser.add_argument("--speed-length", type=int, default=SPEED_LENGTH, help="tokens of the prompt")
    parser.add_argument("--part", choices=("quality", "speed", "both"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the speed part")
    parser.add_argument("--name", default="long_context{}_{}", help="results file; '_speed' or nothing, and the device")
    parser.add_argument("--results", help="folder of the results file (default: docs/results)")
    options = parser.parse_args(arguments)
    for part, name, made in (
        ("quality", options.name.format("", "cpu"), lambda: quality(options.model, options.settings, options.length)),
        (
            "speed",
            options.name.format("_speed", options.device),
            lambda: speed(options.model, options.speed_length, options.device),
        ),
    ):
        records: list[Record] = []
        for record in made() if options.part in (part, "both") else ():
            records.append(record)
            figures = ", ".join(f"{k} {v:.4g}" for k, v in record.metrics.items())
            sys.stdout.write(f"{record.name:26} {figures}\n")
            sys.stdout.flush()
            join_results(name, records, options.results)  # what was measured survives an interruption
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
