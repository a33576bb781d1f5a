"""What is really in force in a running engine: formats by bytes, captures, fallbacks, the governor.

A setting says what was asked for. Here the matrices that are in memory are counted, so that a format that was not
applied, or a kernel that is replaced by plain torch, cannot hide. On a GPU a short text is generated while the sensors
are read, because a card at rest says little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from strata_lab.sampling_params import SamplingParams
from strata_lab.telemetry.checks import Check
from strata_lab.telemetry.monitor import source_for
from strata_lab.telemetry.triage import triage

SECTION = "engine"
PROBE_TOKENS = 96
LOADED_AFTER = 32  # tokens; NVML's utilization looks back for up to a second, so it can only be too low
MIB = 1 << 20


def examine_engine(engine: Any) -> list[Check]:
    """Lines about an open `LLMEngine`; it generates a few tokens."""
    return [*_weights(engine), *_cache(engine), *_steps(engine), *_fallbacks(engine), _governor(engine), *_load(engine)]


def _weights(engine: Any) -> Iterator[Check]:
    parts, wanted = engine.parts, engine.optimizations.as_dict()["weight_format"]
    matrices = list(parts.weights.linears())
    nbytes: Counter[str] = Counter()
    count: Counter[str] = Counter(m.format for m in matrices)
    for m in matrices:
        nbytes[m.format] += m.nbytes
    found = ", ".join(f"{n} matrices {f} ({nbytes[f] / MIB:.0f} MiB)" for f, n in count.most_common())
    layers = {m.format for m in matrices[: 4 * len(parts.weights.layers)]}
    applied = layers == {wanted}
    cause = "" if applied else f"{wanted} is set, but layers are {', '.join(sorted(layers))}"
    fix = (
        "" if applied else "a checkpoint that keeps some layers in another format does this; see the notes of the model"
    )
    yield Check(SECTION, "weights in force", found, "ok" if applied else "warn", fix, cause)
    elements = sum(m.shape[0] * m.shape[1] for m in matrices)
    if not engine.model_config.num_experts:  # their matrices are stacked, and shapes count one of them
        yield Check(SECTION, "bits per weight", f"{8 * sum(nbytes.values()) / elements:.2f}, scales included")


def _cache(engine: Any) -> Iterator[Check]:
    kv = engine.parts.kv
    value = f"{kv.kv_format}, {kv.num_blocks} blocks of {kv.block_size} tokens, {kv.nbytes / MIB:.0f} MiB"
    yield Check(SECTION, "cache in force", value)


def _steps(engine: Any) -> Iterator[Check]:
    runner = engine.parts.runner
    name = type(runner).__name__
    step = type(getattr(runner, "step", None)).__name__
    inner = "" if step == "NoneType" else f" of {step}"
    backend = engine._builder.backend
    slow = backend == "reference"
    fix = "see cpu kernels and torch above" if slow else ""
    cause = "plain torch stands in for the fast operators" if slow else ""
    yield Check(SECTION, "operators", backend, "warn" if slow else "ok", fix, cause)
    yield Check(SECTION, "steps", f"{name}{inner}")


def _fallbacks(engine: Any) -> Iterator[Check]:
    hidden = [f for f in engine.fallbacks if f.feature != "checkpoint"]
    if not hidden:
        yield Check(SECTION, "fallbacks", "none: everything that was asked for is in force")
    for f in hidden:
        fix = "ask for what can be had, or mend what the line names"
        yield Check(SECTION, f"fallback: {f.feature}", f.reason, "warn", fix, "asked for, and not to be had here")


def _governor(engine: Any) -> Check:
    governor = engine.parts.governor
    value = governor.policy
    if value != "off":
        value += f", resting {governor.idle_share:.0%} of the time, {engine._loop.seats} seats"
    return Check(SECTION, "thermal governor", value)


def _load(engine: Any) -> Iterator[Check]:
    """Sensors while it decodes."""
    if engine.device.type != "cuda":
        return
    source = source_for(engine.device)
    prompt = [1] * 16
    try:
        stream = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True))
        for event in stream:
            if event.index == LOADED_AFTER:
                for line in triage(source.read(), loaded=True):
                    yield Check(SECTION, f"loaded: {line.name}", line.value, line.verdict, line.fix, line.cause)
    finally:
        source.close()
