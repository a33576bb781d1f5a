"""Texts in files: what was recorded is what is read, nothing is recorded unasked, and nobody else may read it."""

from __future__ import annotations

import pytest

from strata_lab.engine import LLMEngine
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from strata_lab.speculative.traffic import Text, TrafficFile, read_texts
from tests.checkpoints import VOCAB, write_checkpoint

TEXTS = [Text((1, 2 + i), (5,) * (i + 1), 0.5 * i) for i in range(5)]


def test_texts_survive_a_file_and_a_cut_line_is_left_out(tmp_path) -> None:
    path = tmp_path / "texts.jsonl"
    file = TrafficFile(path)
    for text in TEXTS:
        file.add(text)
    file.close()
    assert path.stat().st_mode & 0o077 == 0, "nobody else may read it"
    path.write_text(path.read_text() + '{"prompt": [1')
    assert list(read_texts(path, VOCAB)) == TEXTS
    more = TrafficFile(path)
    more.add(TEXTS[0])
    more.close()
    assert list(read_texts(path, VOCAB)) == [*TEXTS, TEXTS[0]], "a text behind a cut line is whole"
    for line in ('{"prompt": [1]}', '{"prompt": [1], "output": [999], "temperature": 0}', "3"):
        path.write_text(line + "\n")
        with pytest.raises(ConfigError, match="texts.jsonl:1"):
            list(read_texts(path, VOCAB))


def test_a_file_that_cannot_be_written_is_said_before_a_model_is_loaded(tmp_path) -> None:
    with pytest.raises(ConfigError, match="folder that exists"):
        TrafficFile(tmp_path / "missing" / "texts.jsonl")


def test_an_engine_records_complete_texts_where_it_is_asked_to(tmp_path) -> None:
    folder, _ = write_checkpoint(tmp_path / "model", "llama")
    path = tmp_path / "traffic.jsonl"
    greedy, drawn = (SamplingParams(temperature=t, max_tokens=5, seed=1, ignore_eos=True) for t in (0, 0.7))
    with LLMEngine(folder, device="cpu", max_model_len=64, record_traffic=path) as engine:
        assert engine.abort(engine.add_request([9, 9, 9], greedy))
        outputs = engine.generate([[1, 2, 3], [4, 5]], [greedy, drawn])
    wanted = {Text(o.prompt_token_ids, o.token_ids, t) for o, t in zip(outputs, (0.0, 0.7), strict=True)}
    assert set(read_texts(path, VOCAB)) == wanted, "an aborted text is none"
    with LLMEngine(folder, device="cpu", max_model_len=64) as engine:
        engine.generate([[1, 2, 3]], greedy)
    assert set(read_texts(path, VOCAB)) == wanted
