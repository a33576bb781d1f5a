"""The default model, really: our greedy text is transformers', in float32, for 20 prompts of 64 tokens."""

from __future__ import annotations

import pytest
import torch

from strata_lab.engine import LLMEngine
from strata_lab.models.hub import find_model
from strata_lab.sampling_params import SamplingParams
from tests.test_models import our_logits

MODEL = "smollm2-135m"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees because",
    "1, 1, 2, 3, 5, 8,",
    "In 1969, the first humans",
    "A recipe for bread: mix flour,",
    "import numpy as np\n\nx = np.",
    "The difference between a list and a tuple is",
    "Photosynthesis is the process by which",
    "“Where have you been?” she asked.",
    "Roses are red, violets are",
    "To whom it may concern:",
    "SELECT name, age FROM",
    "The best way to learn a language is",
    "My favourite animal is the",
    "北京是",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
)
FORCED = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=64)

pytestmark = pytest.mark.skipif(find_model(MODEL) is None, reason=f"{MODEL} is not installed; run `make model`")


@pytest.fixture(scope="module")
def outputs():
    """Our greedy continuations in float32."""
    with LLMEngine(MODEL, device="cpu", dtype="float32", cuda_graph=False) as engine:
        assert engine.optimizations.weight_format == engine.optimizations.kv_cache_dtype == "fp32"
        return engine.generate(list(PROMPTS), FORCED)


def test_greedy_text_equals_transformers(outputs) -> None:
    """Teacher forcing proves it by induction: given our tokens so far, transformers' most likely next one is ours."""
    transformers = pytest.importorskip("transformers")
    path = find_model(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for output in outputs:
        tokens = torch.tensor([*output.prompt_token_ids, *output.token_ids])
        with torch.inference_mode():
            logits = model(tokens[None]).logits[0]
        start = len(output.prompt_token_ids) - 1
        chosen = logits[start:-1].argmax(-1)
        assert chosen.tolist() == list(output.token_ids), output.prompt


def test_the_exact_engine_answers_the_question() -> None:
    with LLMEngine(MODEL, device="cpu", dtype="float32") as engine:
        answer = engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert answer.text == "The capital of France is Paris." and answer.finish_reason == "stop"


def test_the_default_formats_stay_close_to_the_exact_model() -> None:
    """Weights as stored (lossless), activations in int8 groups: mean KL divergence below 0.01 nats per position."""
    with LLMEngine(MODEL, device="cpu", max_model_len=512) as engine:
        assert engine.optimizations.weight_format == "int4"  # what the file stores
        tokens = engine.tokenizer.encode(" ".join(PROMPTS[:8]))
    options = {"slices": (len(tokens),), "max_model_len": 512, "cuda_graph": False}
    exact, ours = (our_logits(MODEL, tokens, dtype=d, **options).log_softmax(-1) for d in ("float32", "auto"))
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    assert divergence.mean().item() < 0.01


@pytest.mark.parametrize(
    "changes", [{"fused_kernels": False}, {"cuda_graph": True}, {"continuous_batching": False}], ids=str
)
def test_lossless_toggles_keep_the_default_models_text(changes) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLMEngine(MODEL, device="cpu", cuda_graph=False) as engine:
        before = [o.token_ids for o in engine.generate(list(PROMPTS[:6]), params)]
        assert engine.apply(**changes).ok
        assert [o.token_ids for o in engine.generate(list(PROMPTS[:6]), params)] == before
