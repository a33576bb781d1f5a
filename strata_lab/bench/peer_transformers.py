"""transformers as a peer: a worker process, float32, eager; the same protocol as `peer_llama_cpp.py`.

The loop is the shortest one that transformers allows (its own model and cache, argmax, no `generate` bookkeeping), so
the peer is measured at its best. It imports nothing of ours.
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


class Transformers:
    """A causal model from a .gguf file or a Hugging Face folder, in float32."""

    def __init__(self, path: Path) -> None:
        source = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()

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
