"""What each toggle does on a given kind of device, in one sentence for a tooltip. No toggle's value is read here."""

from __future__ import annotations

_SHARED = {
    "continuous_batching": "New requests join the running batch at the next step; off makes them wait for all of it.",
    "prefix_cache": "A second turn of a chat, or a common system prompt, is computed once: the time to its first token "
    "shrinks to that of what is new. It uses only blocks that are free, so nobody gets less.",
    "scheduling_policy": "priority lets urgent requests start at once under load; those of lower priority are put back "
    "and computed again. Without priorities both are the same.",
    "max_passes": "While a long request waits for room, short ones behind it finish: their waits shrink, its own grows "
    "by at most that many of them.",
    "watermark": "New requests wait while the pool is nearly full, so that those who run can grow: less is computed "
    "twice, and fewer run at a time. Preempted requests and urgent ones need not leave anything.",
    "watermark_high": "After a request lost its blocks newcomers wait until this share is free, so that the pool does "
    "not run short again at once.",
    "preemption": "swap copies a request's blocks to host memory and back instead of computing its tokens again, where "
    "that is dearer: long texts, few requests. What host memory does not hold is computed again.",
    "max_waiting": "Beyond this many waiting requests new ones are refused at once, so that those who wait are served "
    "in time.",
    "max_waiting_tokens": "Bounds how much work waits, where prompts differ in length.",
    "kv_window": "Attention reads, and the pool keeps, only the first kv_sinks and the last kv_window tokens: long "
    "texts cost no more than short ones. What was said before is forgotten, but not what the model made of it since.",
    "kv_sinks": "A few first tokens hold the attention that has nothing to look at; without them a window ruins the "
    "text. They count only while kv_window is not 0.",
    "sparse_pages": "Decode reads the bounds of all blocks, a 16th of what attention reads, and of keys and values "
    "only those that a token asks for most: long texts cost less time, as much memory, and nothing is forgotten.",
    "pd_split": "Decode steps alternate with bounded prompt slices: running streams wait less for a newcomer's prompt, "
    "whose first token comes later.",
    "max_num_seqs": "More requests share one reading of the weights: total tok/s rises, tok/s per stream falls.",
    "max_num_batched_tokens": "Long prompts are sliced to this budget, so running streams stall less per step.",
    "max_model_len": "Bounds one request; the KV pool must hold at least one request of this length.",
}
_CPU = {
    "speculative": "Verifying a few tokens costs a little more than computing one, so right guesses are cheap tokens: "
    "text that repeats itself gains most. Drafting stops where the clock says that it loses.",
    "num_draft_tokens": "Bounds a guess; how many pay is measured here, usually 3 to 8.",
    "cuda_graph": "The decode step is recorded once per batch size and replayed: no Python, no dispatch, no allocation "
    "between its operators, as with a CUDA graph.",
    "fused_kernels": "Norm, bias, SiLU and residual run inside the products, q/k/v and gate/up are one product each.",
    "batch_invariant": "Routing of a mixture, and plain torch where the C++ operators cannot serve a model, compute "
    "every row alone. The C++ operators give each row the same bits anyway.",
    "weight_format": "Decode reads every weight once per token: half the bytes is up to twice the speed. int8 and int4 "
    "also quantize activations to 8 bits per 32 values.",
    "kv_cache_dtype": "Storage only: fp8 holds twice the tokens of bf16; at short context the speed hardly changes.",
    "thermal_governor": "No effect here: a CPU has no sensor to govern by.",
    "gpu_memory_utilization": "Share of the free main memory; the KV pool also never takes more than its CPU cap.",
}
_CUDA = {
    "thermal_governor": "The card's temperatures are read once a second, and steps or seats held back as far as needed "
    "to stay below where it would cut its clocks. Clocks and power limits are never changed.",
    "speculative": "A step reads the weights once however many tokens it verifies, so at small batches right guesses "
    "are almost free. Copies are looked up and a draft model guesses on the card, ahead of the host, for up to 4 "
    "requests at a time. Drafting stops where the clock says that it loses.",
    "num_draft_tokens": "Bounds a guess; how many pay is measured on this card, of 1, 2, 3, 5 and 7.",
    "cuda_graph": "The decode step, sampling included, is a CUDA graph per batch size that feeds its own tokens back; "
    "steps with prompts are graphs from their second time on. Off launches every kernel from Python.",
    "fused_kernels": "Norms, RoPE, cache write, SiLU, weighted sums and residuals run inside products and attention; "
    "off gives each a kernel of its own.",
    "batch_invariant": "One kernel and one order of sums for every number of rows: decodes at long contexts and "
    "prompts get slower, tokens per second at batch 1 a little.",
    "weight_format": "Decode reads every weight once per token, so half the bytes is up to twice the speed; weights "
    "are dequantized in registers inside the products.",
    "kv_cache_dtype": "fp8 holds twice the tokens of bf16 and halves what attention reads at long context.",
    "gpu_memory_utilization": "Share of the card's memory for weights, KV pool and workspace together.",
}


def explain(device_type: str) -> dict[str, str]:
    """Toggle name to what it does on "cpu" or "cuda"."""
    return _SHARED | (_CUDA if device_type == "cuda" else _CPU)
