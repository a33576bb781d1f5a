"""Laws of the settings: everything is checked once, errors say what would work, toggles are derived and complete."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

import pytest

from strata_lab.config import ALIASES, DEFAULT_MODEL, TOPICS, EngineConfig, Optimizations, engine_config, toggles
from strata_lab.model_config import ModelConfig
from strata_lab.settings import ConfigError, Toggle, check_names

TINY = {
    "architecture": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position": 128,
}


def bad_values(toggle: Toggle) -> list[Any]:
    """Values of the wrong type or out of bounds."""
    if toggle.kind == "bool":
        return [None, 0, 1, "on", "True"]
    if toggle.kind == "choice":
        return ["", "int5", "BF16", 8, True] + ([] if toggle.optional else [None])
    values: list[Any] = ["16", True, float("nan"), float("inf"), [16]] + ([] if toggle.optional else [None])
    values += [1.5] if toggle.kind == "int" else []
    values += [] if toggle.minimum is None else [toggle.minimum - 1, -1000]
    return values + ([] if toggle.maximum is None else [toggle.maximum + 1])


BAD = [pytest.param(t, v, id=f"{t.name}={v!r}") for t in toggles() for v in bad_values(t)]


# -- toggles ----------------------------------------------------------------------------------------------------------


def test_every_field_of_optimizations_is_a_toggle_in_order() -> None:
    assert [t.name for t in toggles()] == [f.name for f in dataclasses.fields(Optimizations)]


@pytest.mark.parametrize("toggle", toggles(), ids=lambda t: t.name)
def test_a_toggle_is_documented_and_its_own_values_are_legal(toggle: Toggle) -> None:
    assert toggle.topic in TOPICS
    assert toggle.doc.endswith(".")
    assert len(toggle.doc) > 20
    assert toggle.kind in ("bool", "choice", "int", "float")
    assert toggle.cost in ("live", "rebuild")
    assert bool(toggle.choices) == (toggle.kind == "choice")
    assert toggle.check(toggle.off) == toggle.off
    assert toggle.check(toggle.default) == toggle.default
    assert getattr(Optimizations(), toggle.name) == toggle.default
    assert getattr(Optimizations.none(), toggle.name) == toggle.off
    if toggle.kind == "choice":
        assert toggle.choices[0] == toggle.off  # the off value comes first


def test_none_turns_every_switch_off() -> None:
    off = Optimizations.none()
    assert not any(getattr(off, t.name) for t in toggles() if t.kind == "bool")
    assert (off.weight_format, off.kv_cache_dtype) == ("bf16", "bf16")
    assert off != Optimizations()


@pytest.mark.parametrize(("toggle", "value"), BAD)
def test_a_bad_toggle_is_refused_with_its_value_the_rule_and_a_value_that_works(toggle: Toggle, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Optimizations(**{toggle.name: value})
    text = str(error.value)
    assert text.startswith(f"{toggle.name}={value!r}")
    assert re.search(r"must be (True or False|one of|a (whole )?number|at least|at most)", text)
    works = ast.literal_eval(text.rsplit("try ", 1)[1])
    assert toggle.check(works) == works


def test_bounds_are_inclusive_and_numbers_get_their_type() -> None:
    assert Optimizations(max_num_seqs=1).max_num_seqs == 1
    assert Optimizations(max_num_seqs=1024).max_num_seqs == 1024
    whole = Optimizations(gpu_memory_utilization=1).gpu_memory_utilization
    assert (whole, type(whole)) == (1.0, float)


def test_replace_changes_only_what_is_named_and_checks_it() -> None:
    before = Optimizations()
    after = before.replace({"max_num_seqs": 4, "cuda_graph": False})
    assert (after.max_num_seqs, after.cuda_graph) == (4, False)
    assert after.replace({"max_num_seqs": before.max_num_seqs, "cuda_graph": before.cuda_graph}) == before
    with pytest.raises(ConfigError, match="max_num_seqs=0 must be at least 1; try 16"):
        before.replace({"max_num_seqs": 0})
    with pytest.raises(ConfigError, match=r"unknown optimization 'cuda_grph'; did you mean 'cuda_graph'\?"):
        before.replace({"cuda_grph": True})


def test_optimizations_are_frozen_and_list_themselves() -> None:
    optimizations = Optimizations(max_num_seqs=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizations.max_num_seqs = 4  # type: ignore[misc]
    assert list(optimizations.as_dict()) == [t.name for t in toggles()]
    assert Optimizations(**optimizations.as_dict()) == optimizations


def test_an_unknown_name_without_a_near_match_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="unknown thing 'zzz'; known are apple, pear"):
        check_names({"zzz": 1}, ["apple", "pear"], "thing")


# -- engine options ---------------------------------------------------------------------------------------------------


def test_flat_options_reach_the_config_and_the_toggles() -> None:
    config = engine_config("m.gguf", block_size=32, num_kv_blocks=7, seed=5, max_num_seqs=3, cuda_graph=False)
    assert (config.model, config.block_size, config.num_kv_blocks, config.seed) == ("m.gguf", 32, 7, 5)
    assert config.optimizations == Optimizations(max_num_seqs=3, cuda_graph=False)
    assert engine_config() == EngineConfig(model=DEFAULT_MODEL)


def test_the_call_of_the_source_articles_works_as_written() -> None:
    config = engine_config(
        model="some/folder",
        quantization="int4",
        max_batch_size=16,
        max_seq_len=4096,
        gpu_memory_utilization=0.92,
        block_size=16,
        dtype="bfloat16",
    )
    wanted = Optimizations(weight_format="int4", max_num_seqs=16, max_model_len=4096, gpu_memory_utilization=0.92)
    assert (config.optimizations, config.block_size, config.dtype) == (wanted, 16, "bfloat16")


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_its_field_and_cannot_be_given_beside_it(alias: str, name: str) -> None:
    value = {"bool": False, "choice": "int8"}.get(next(t.kind for t in toggles() if t.name == name), 64)
    assert getattr(engine_config(**{alias: value}).optimizations, name) == value
    with pytest.raises(ConfigError, match=f"{alias} and {name} are the same setting; give only {name}"):
        engine_config(**{alias: value, name: value})


def test_options_override_the_optimizations_given_beside_them() -> None:
    config = engine_config(optimizations=Optimizations.none(), max_num_seqs=2)
    assert config.optimizations == Optimizations.none().replace({"max_num_seqs": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, r"unknown engine option 'max_num_seq'; did you mean 'max_num_seqs'\?"),
        ({"quantisation": "int4"}, r"unknown engine option 'quantisation'; did you mean 'quantization'\?"),
        ({"quantization": "int5"}, "weight_format='int5' must be one of bf16, fp32, fp8, int8, int4; try 'bf16'"),
        ({"max_batch_size": 0}, "max_num_seqs=0 must be at least 1; try 16"),
        ({"max_seq_len": 1}, "max_model_len=1 must be at least 2; try 2"),
        ({"device": "gpu"}, "device='gpu' must be one of auto, cpu, cuda; try 'auto'"),
        ({"device": "cuda:x"}, "device='cuda:x' must be one of auto, cpu, cuda"),
        ({"device": 0}, "device='0' must be one of auto, cpu, cuda"),
        ({"dtype": "fp16"}, "dtype='fp16' must be one of auto, float32, bfloat16, float16; try 'auto'"),
        ({"block_size": 12}, "block_size=12 must be one of 8, 16, 32; try 8"),
        ({"block_size": 16.0}, "block_size=16.0 must be a whole number of at least 8; try 16"),
        ({"block_size": "16"}, "block_size='16' must be"),
        ({"num_kv_blocks": 0}, "num_kv_blocks=0 must be a whole number of at least 1; try 64"),
        ({"num_kv_blocks": "64"}, "num_kv_blocks='64' must be a whole number of at least 1; try 64"),
        ({"num_kv_blocks": 2.5}, "num_kv_blocks=2.5 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0; try 42"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"capture": "yes"}, "capture='yes' must be one of replay, inductor; try 'replay'"),
        ({"optimizations": {"cuda_graph": False}}, r"must be an Optimizations; try Optimizations\(\)"),
    ],
    ids=str,
)
def test_a_bad_engine_option_is_refused_with_a_value_that_works(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config(**options)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices_are_named_as_torch_names_them(device: str) -> None:
    assert engine_config(device=device).device == device


def test_an_object_that_prints_as_a_device_or_a_path_is_welcome(tmp_path: Any) -> None:
    class Device:
        def __str__(self) -> str:
            return "cuda:1"

    config = engine_config(tmp_path, device=Device())
    assert (config.model, config.device) == (str(tmp_path), "cuda:1")


# -- model geometry ---------------------------------------------------------------------------------------------------


def test_a_model_config_takes_what_the_families_need() -> None:
    dense = ModelConfig(**TINY)
    assert (dense.num_experts, dense.qk_norm, dense.attention_bias, dense.eos_token_ids) == (0, False, False, ())
    assert ModelConfig(**TINY, num_experts=8, num_experts_per_tok=8).num_experts == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 in the model's config must be a whole number of at least 1"),
        ({"vocab_size": None}, "vocab_size=None in the model's config must be a whole number of at least 1"),
        ({"hidden_size": 32.5}, "hidden_size=32.5 in the model's config must be a whole number"),
        ({"max_position": -1}, "max_position=-1 in the model's config must be a whole number"),
        ({"num_q_heads": 5}, "num_q_heads=5 must be a multiple of num_kv_heads=2; check num_attention_heads"),
        ({"head_dim": 7}, "head_dim=7 must be even for rotary embeddings; try 8"),
        ({"num_experts": 4}, "num_experts_per_tok=0 must be from 1 to num_experts=4"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 must be from 1 to num_experts=4"),
    ],
    ids=str,
)
def test_an_impossible_geometry_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**TINY, **changes})
