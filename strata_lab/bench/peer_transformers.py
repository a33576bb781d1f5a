"""transformers as a peer: a worker process, float32, eager; the same protocol as `peer_llama_cpp.py`.

The loop is the shortest one that transformers allows (its own model and cache, argmax, no `generate` bookkeeping), so
the peer is measured at its best. Only the weights of a .gguf file come through our loader, because transformers needs
another package for that; the numbers are then the same for everybody.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def load(path: Path) -> Any:
    """A causal model in float32 from a Hugging Face folder or a .gguf file of a dense family."""
    if path.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    from strata_lab.models.loader import open_checkpoint

    checkpoint = open_checkpoint(str(path))
    c = checkpoint.config
    if c.architecture not in CLASSES or c.rope_scaling:
        raise SystemExit(
            f"{path}: a {c.architecture} model from a .gguf file is more than this peer can do; give a folder"
        )
    kind = CLASSES[c.architecture]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position,
        rms_norm_eps=c.rms_norm_eps,
        tie_word_embeddings=c.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    weights = {name: plain(checkpoint, name) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model.eval()


def plain(checkpoint: Any, name: str) -> torch.Tensor:
    """What a tensor of a checkpoint means, float32."""
    from strata_lab.models.checkpoint import is_linear
    from strata_lab.quant import get_format

    stored = checkpoint.linear(name) if is_linear(name) else checkpoint.tensor(name)
    return stored.float() if torch.is_tensor(stored) else get_format(stored.format).dequantize(stored)


class Transformers:
    """A causal model in float32 from a .gguf file or a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self.model = load(path)

    def _prompt(self, prompts: list[list[int]]) -> tuple[torch.Tensor, Any]:
        out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds from the prompt to its first token, for the first prompt."""
        begin = time.perf_counter()
        self._prompt(prompts[:1])
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], output_tokens: int) -> float:
        """Seconds for `output_tokens - 1` greedy steps of all sequences together, after their first tokens."""
        tokens, cache = self._prompt(prompts)
        begin = time.perf_counter()
        for _ in range(output_tokens - 1):
            out = self.model(tokens, past_key_values=cache, use_cache=True)
            tokens, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        return time.perf_counter() - begin


def main() -> None:
    """Answer requests from standard input until it ends."""
    parser = argparse.ArgumentParser(description="transformers as a peer of strata_lab.bench.compare")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    engine = Transformers(args.model)
    _say({"version": transformers.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "prefill":
            _say({"seconds": engine.prefill(request["prompts"])})
        else:
            _say({"seconds": engine.decode(request["prompts"], request["output_tokens"])})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
