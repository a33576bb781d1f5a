"""Laws of counting experts: it shows what the router chose, only while somebody looks, and changes no token."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata_lab.engine import LLMEngine
from strata_lab.events import ExpertEvent, SettingEvent
from strata_lab.expert_counts import Tally
from strata_lab.kernels.moe_block import moe_block_cpu
from strata_lab.kernels.router_topk import router_topk_ref
from strata_lab.runner import EagerStep
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from strata_lab.workbench import Workbench
from strata_lab.workbench.experts import DENSE, evenness, expert_numbers
from strata_lab.workbench.recording import decode, encode
from tests.fake_engine import PATIENCE_S, FakeEngine, eventually

MODEL = "moe-small@0.5"  # 4 layers, 8 experts, 2 a token
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 9, 14, 3, 22], [7, 8]]
COMPUTED = 5 + 2 + 2 * 5  # prompts, and every output token but the last of each


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(MODEL, device="cpu", dtype="float32", max_model_len=300, prefix_cache=False) as made:
        yield made


@pytest.fixture(autouse=True)
def _unwatched(engine: LLMEngine) -> Iterator[None]:
    yield
    engine.watch_experts(False)
    assert engine.apply(fused_kernels=True, batch_invariant=False).ok


def counts(engine: LLMEngine) -> list[int]:
    event = engine.experts()
    return [0] * 32 if event is None else list(event.counts)


def counted(engine: LLMEngine) -> list[int]:
    """Choices of one generation."""
    before = counts(engine)
    engine.generate(PROMPTS, GREEDY)
    return [now - then for now, then in zip(counts(engine), before, strict=True)]


def tokens(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_every_computed_token_chooses_its_experts_in_every_layer_and_no_text_changes(
    engine: LLMEngine, fused: bool, invariant: bool
) -> None:
    assert engine.apply(fused_kernels=fused, batch_invariant=invariant).ok
    before = tokens(engine)
    engine.watch_experts()
    assert tokens(engine) == before
    rows = torch.tensor(counted(engine)).view(4, 8)
    assert rows.sum(1).tolist() == [2 * COMPUTED] * 4
    assert rows.max() <= COMPUTED, "a token takes an expert once"


def test_counts_are_the_choices_that_a_swapped_router_saw(engine: LLMEngine) -> None:
    seen: Counter[int] = Counter()

    def router(x: Tensor, router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        weights, ids = router_topk_ref(x, router, top_k, normalize)
        seen.update(ids.flatten().tolist())
        return weights, ids

    assert engine.apply(fused_kernels=False).ok
    engine.watch_experts()
    assert engine.swap_op("router_topk", router).ok
    seen.clear()
    found = torch.tensor(counted(engine)).view(4, 8).sum(0).tolist()
    assert found == [seen[expert] for expert in range(8)]
    assert engine.swap_op("router_topk", None).ok


def test_a_swapped_block_that_tells_nothing_is_counted_too(engine: LLMEngine) -> None:
    engine.watch_experts()
    built_in = counted(engine)

    def block(x: Tensor, norm_weight: Tensor, eps: float, router: Tensor, *rest: Any, **options: Any) -> Tensor:
        return moe_block_cpu(x, norm_weight, eps, router, *rest, **options)

    assert engine.swap_op("moe_block", block).ok
    assert counted(engine) == built_in
    assert engine.swap_op("moe_block", None).ok


def test_a_step_that_does_not_count_is_the_one_it_was_before(engine: LLMEngine) -> None:
    step = engine._loop.parts.runner
    assert type(step.step) is EagerStep
    engine.watch_experts()
    assert engine._loop.parts.runner is not step
    engine.watch_experts(False)
    assert engine._loop.parts.runner is step
    assert counted(engine) == [0] * 32


def test_rows_that_only_pad_are_not_counted() -> None:
    tally = Tally()
    tally.row, tally.slots = torch.zeros(4, dtype=torch.int64), torch.tensor([3, -1, 0])
    tally.ids(torch.tensor([[0, 1], [2, 3], [1, 2]]))
    assert tally.row.tolist() == [1, 2, 1, 0]


def test_a_dense_model_says_that_it_has_none() -> None:
    with LLMEngine("qwen3.8-flash-dense@0.02", device="cpu", max_model_len=64, cuda_graph=False) as dense:
        with pytest.raises(ConfigError, match="has no experts to count: it is dense"):
            dense.watch_experts()
        assert dense.experts() is None


# -- the panel --------------------------------------------------------------------------------------------------------


def test_the_panel_shows_the_counts_of_the_engine_and_counts_only_while_it_is_open(engine: LLMEngine) -> None:
    bench = Workbench(engine, name="experts")
    try:
        bar, shown = bench.panels.details_bar, bench.panels.experts.map
        eventually(lambda: "experts" in [panel["name"] for panel in bar.panels])
        assert bar.note == "" and not engine._watched
        bar._handle_custom_msg({"kind": "open", "name": "experts", "open": True}, [])
        eventually(lambda: engine._watched)
        eventually(lambda: len(shown.counts) == 4 * 8 * 8)
        shown._handle_custom_msg({"kind": "restart"}, [])
        run = bench.load("users")
        assert run.wait(60)
        total = 4 * (64 + 192 - 1)
        eventually(lambda: shown.numbers[0]["value"] == str(total))
        rows = struct.unpack("<32d", shown.counts)
        assert sum(rows) == total * 2 * 4
        assert (shown.num_layers, shown.num_experts, shown.top_k) == (4, 8, 2)
        labels = [m["label"] for m in bench.panels.chart.markers]
        assert labels == ["4 users"], "counting is no change of settings"
        bench.fold("experts")
        eventually(lambda: not engine._watched)
        bench.open("experts")
        eventually(lambda: engine._watched)
    finally:
        bench.retire()
    assert not engine._watched, "an engine that outlives the panel does not go on counting"


def test_a_dense_model_gets_no_button_but_a_sentence() -> None:
    engine = FakeEngine()
    bench = Workbench(engine, name="dense")
    try:
        bar = bench.panels.details_bar
        eventually(lambda: bar.note == "Experts: none: this model is dense.")
        assert "experts" not in [panel["name"] for panel in bar.panels]
        bench.open("experts")
        eventually(lambda: bench.panels.experts.map.note == DENSE)
        assert bench.panels.experts.map.counts == b""
    finally:
        bench.retire()
        engine.close()


def test_a_recording_of_a_mixture_shows_its_experts(engine: LLMEngine, tmp_path: Path) -> None:
    bench = Workbench(engine, name="recorded")
    try:
        bench.open("experts")
        eventually(lambda: engine._watched)
        with bench.record(tmp_path / "s.jsonl"):
            assert bench.load("long").wait(60)
            eventually(lambda: bench.panels.experts.map.enabled)
    finally:
        bench.retire()
    shown = Workbench.replay(tmp_path / "s.jsonl")
    try:
        shown.open("experts")
        assert shown.engine.finished.wait(PATIENCE_S)
        eventually(lambda: shown.panels.experts.map.num_layers == 4)
        assert "experts" in [panel["name"] for panel in shown.panels.details_bar.panels]
    finally:
        shown.retire()


def test_counts_survive_being_written_and_read() -> None:
    event = ExpertEvent(12.0, (1, 2, 3, 4), 2, 2, 1)
    assert decode(json.loads(encode(event, 10.0)), 10.0) == event


def test_figures_above_the_map_follow_their_formulas() -> None:
    assert evenness([2, 2, 2, 2]) == pytest.approx(1.0)
    assert evenness([8, 0, 0, 0]) == 0.0
    values = {n["label"]: n["value"] for n in expert_numbers([6, 2, 0, 0, 2, 2, 2, 2], 4, 2)}
    assert values["tokens"] == "4"
    assert values["busiest"] == "75.0% (layer 0, expert 0)"
    assert values["never chosen"] == "2 of 8"
    assert values["evenness"] == f"{(0.8112781 / 2 + 1) / 2:.3f}"  # entropy of 3/4, 1/4 in bits, of log2(4)
    assert [n["value"] for n in expert_numbers([0] * 4, 2, 1)] == ["0", "\u2013", "4 of 4", "\u2013"]


def test_counting_tells_of_no_change_of_settings(engine: LLMEngine) -> None:
    cursor = engine.events.cursor
    engine.watch_experts()
    assert [e.changes for e in engine.events.since(cursor)[0] if isinstance(e, SettingEvent)] == [{}]
