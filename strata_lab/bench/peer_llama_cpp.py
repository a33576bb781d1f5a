"""llama.cpp as a peer: a worker process that decodes what it is told to and answers with seconds.

Runs under the interpreter of an environment that has `llama-cpp-python` (and numpy), which need not have this
project or torch: it imports nothing of ours. One JSON object per line in, one out; see `compare.py`. It gets its best
settings: as many threads as asked for, a context of its own per batch size, flash attention where that is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

FILE_TYPES = {"shipped": None, "q8_0": 7, "f16": 1}  # llama.h: enum llama_ftype
CALIBRATION_TOKENS = 24
FLASH = (0, 1)  # llama.h: LLAMA_FLASH_ATTN_TYPE_DISABLED, _ENABLED


class LlamaCpp:
    """One model file with one context per batch size.

    Args:
        api: the `llama_cpp` module.
        path: a .gguf file.
        threads: for decoding and for prompts.
        length: most tokens of one sequence.
    """

    def __init__(self, api: Any, path: Path, threads: int, length: int) -> None:
        self.api = api
        self.api.llama_backend_init()
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = self.api.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.threads, self.length = threads, length
        self.num_vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.contexts: dict[int, Any] = {}
        self.flash: dict[int, int] = {}

    def calibrate(self, prompts: list[list[int]]) -> None:
        """Make the context for this batch size, with flash attention on or off, whichever decodes faster."""
        size = len(prompts)
        seconds = {}
        for flash in FLASH:
            self.contexts[size] = self._context(size, flash)
            self.decode(prompts, CALIBRATION_TOKENS)  # warm-up
            seconds[flash] = self.decode(prompts, CALIBRATION_TOKENS)
            self.api.llama_free(self.contexts[size])
        self.flash[size] = min(seconds, key=lambda f: seconds[f])
        self.contexts[size] = self._context(size, self.flash[size])

    def _context(self, num_sequences: int, flash: int) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx = num_sequences * self.length
        params.n_seq_max = num_sequences
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = flash
        params.no_perf = True
        return self.api.llama_init_from_model(self.model, params)

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds from the prompt to its first token, for the first prompt."""
        context = self._cleared(len(prompts))
        begin = time.perf_counter()
        self._prompt(context, prompts[0], 0)
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], output_tokens: int) -> float:
        """Seconds for `output_tokens - 1` greedy steps of all sequences together, after their first tokens."""
        context = self._cleared(len(prompts))
        tokens = [self._prompt(context, prompt, sequence) for sequence, prompt in enumerate(prompts)]
        batch = self.api.llama_batch_init(len(prompts), 0, 1)
        begin = time.perf_counter()
        for step in range(output_tokens - 1):
            batch.n_tokens = len(prompts)
            for i, prompt in enumerate(prompts):
                _fill(batch, i, tokens[i], len(prompt) + step, i, wants_logits=True)
            _check(self.api.llama_decode(context, batch))
            tokens = [self._greedy(context, i) for i in range(len(prompts))]
        seconds = time.perf_counter() - begin
        self.api.llama_batch_free(batch)
        return seconds

    def _cleared(self, size: int) -> Any:
        context = self.contexts[size]
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        return context

    def _prompt(self, context: Any, prompt: list[int], sequence: int) -> int:
        batch = self.api.llama_batch_init(len(prompt), 0, 1)
        batch.n_tokens = len(prompt)
        for i, token in enumerate(prompt):
            _fill(batch, i, token, i, sequence, wants_logits=i == len(prompt) - 1)
        _check(self.api.llama_decode(context, batch))
        token = self._greedy(context, len(prompt) - 1)
        self.api.llama_batch_free(batch)
        return token

    def _greedy(self, context: Any, index: int) -> int:
        logits = self.api.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self.num_vocab,)).argmax())


def _fill(batch: Any, i: int, token: int, position: int, sequence: int, *, wants_logits: bool) -> None:
    batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
    batch.seq_id[i][0] = sequence
    batch.logits[i] = wants_logits


def _check(code: int) -> None:
    if code:
        raise SystemExit(f"llama_decode failed with {code}")


def converted(api: Any, path: Path, file_type: str, folder: Path) -> Path:
    """The model in another number format, made once with llama.cpp's own quantizer."""
    number = FILE_TYPES[file_type]
    if number is None:
        return path
    made = folder / f"{path.stem}.{file_type}.gguf"
    if not made.exists():
        params = api.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = number, True
        part = made.with_suffix(".part")
        if api.llama_model_quantize(str(path).encode(), str(part).encode(), params):
            raise SystemExit(f"llama.cpp cannot convert {path} to {file_type}")
        part.replace(made)
    return made


def main() -> None:
    """Answer requests from standard input until it ends."""
    parser = argparse.ArgumentParser(description="llama.cpp as a peer of strata_lab.bench.compare")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--file-type", choices=list(FILE_TYPES), default="shipped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args()
    import llama_cpp  # here, so that this file can be looked at where there is none

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # its log would fill the pipe
    llama_cpp.llama_log_set(silent, None)
    model = converted(llama_cpp, args.model, args.file_type, args.scratch)
    engine = LlamaCpp(llama_cpp, model, args.threads, args.length)
    _say({"version": llama_cpp.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        prompts = request["prompts"]
        if len(prompts) not in engine.contexts:
            engine.calibrate(prompts)
        if request["op"] == "prefill":
            _say({"seconds": engine.prefill(prompts)})
        else:
            _say({"seconds": engine.decode(prompts, request["output_tokens"])})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
