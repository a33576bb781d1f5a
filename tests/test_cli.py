"""Laws of the `strata` command: flags come from fields, text and talk about text never mix, mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from typer.testing import CliRunner, Result

from strata_lab import __version__, cli
from strata_lab.bench.harness import Environment, Spread
from strata_lab.cli import answers
from strata_lab.cli.options import (
    attribute_docs,
    config_flags,
    parse_toggle,
    recipe_flags,
    sampling_flags,
    sampling_params,
    server_flags,
    toggle_flags,
)
from strata_lab.config import EngineConfig, toggles
from strata_lab.events import TokenEvent
from strata_lab.sampling_params import SamplingParams
from strata_lab.settings import ConfigError
from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
SECONDS_TO_HELP = 1.0
QUICK = ["--no-cuda-graph", "--device", "cpu", "--max-model-len", "200", "--max-tokens", "12", "--temperature", "0"]


def strata(*arguments: Any, input: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=input)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A tiny Llama with a tokenizer and a chat template."""
    return write_checkpoint(tmp_path_factory.mktemp("cli"), "llama", max_position_embeddings=512)[0]


# -- flags ------------------------------------------------------------------------------------------------------------


def test_help_is_instant_and_imports_no_torch() -> None:
    code = "import sys, strata_lab.cli as c\ntry: c.app(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        best = min(best, time.perf_counter() - start)
    assert done.stdout.splitlines()[-1] == "False"
    assert all(command in done.stdout for command in ("generate", "chat", "climb", "doctor"))
    assert best < SECONDS_TO_HELP


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_toggle_and_setting_is_a_flag_with_its_own_words(command: str) -> None:
    text = strata(command, "--help").stdout
    words = " ".join(text.split())
    for toggle in toggles():
        flag = f"--{toggle.name.replace('_', '-')}"
        assert flag in text
        assert f"--no-{flag[2:]}" in words if toggle.kind == "bool" else True
        assert toggle.doc.rstrip(".") in words
        assert "|".join(toggle.choices) in words
    for name in ("--device", "--dtype", "--block-size", "--num-kv-blocks", "--max-tokens", "--stop", "--seed"):
        assert name in text


def test_every_documented_field_has_its_text() -> None:
    for cls in (EngineConfig, SamplingParams):
        docs = attribute_docs(cls)
        assert set(docs) == set(cls.__dataclass_fields__)
        assert all(len(text) > 5 and "\n" not in text for text in docs.values())


def test_a_flag_that_is_not_given_leaves_the_default_alone() -> None:
    assert all(p.default is None for p in [*toggle_flags(), *sampling_flags()])


def test_every_flag_is_of_a_type_that_every_typer_knows() -> None:
    flags = [*toggle_flags(), *config_flags(), *sampling_flags(), *server_flags(), *recipe_flags()]
    kinds = {str(next(a for a in get_args(get_args(p.annotation)[0]) if a is not type(None))) for p in flags}
    plain = (bool, int, float, str, Path)
    assert kinds <= {str(kind) for kind in (*plain, *(list[kind] for kind in plain))}  # type: ignore[valid-type]


def test_what_shape_a_text_must_have_is_given_as_json() -> None:
    wish = sampling_params({"structured_outputs": '{"choice": ["yes", "no"]}', "max_tokens": 3, "stop": []})
    assert wish == SamplingParams(structured_outputs={"choice": ["yes", "no"]}, max_tokens=3)


def test_the_version_is_the_packages() -> None:
    assert strata("--version").stdout == f"strata {__version__}\n"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cuda_graph", "off", False), ("fused-kernels", "ON", True), ("weight_format", "int8", "int8"),
        ("weight_format", "none", None), ("max_num_seqs", "4", 4), ("gpu_memory_utilization", "0.5", 0.5),
    ],
)  # fmt: skip
def test_values_of_toggles_are_read_as_people_write_them(name: str, text: str, value: Any) -> None:
    assert parse_toggle(name, text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cuda_grph", "on", "did you mean 'cuda_graph'"), ("cuda_graph", "maybe", "must be True or False"),
        ("max_num_seqs", "many", "must be a whole number"), ("weight_format", "int3", "must be one of"),
        ("max_num_seqs", "0", "at least 1"),
    ],
)  # fmt: skip
def test_wrong_values_of_toggles_say_what_would_be_right(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_toggle(name, text)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--weight-format", "int3"], "weight_format='int3' must be one of"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens=0 must be a whole number"),
        (["generate", "x", "--block-size", "7"], "block_size=7 must be one of 8, 16, 32"),
        (["generate", "x", "--structured-outputs", "yes"], "structured_outputs='yes' must be a JSON object"),
        (["generate", "x", "--structured-outputs", '{"chioce": 1}'], "unknown key 'chioce'"),
        (["chat", "--temperature", "-1"], "temperature=-1.0 must be a number"),
        (["generate", "x", "-m", "no/such/model"], "no/such/model"),
        (["climb", "--tokens", "2"], "tokens=2 must be at least 8"),
        (["climb", "--workload", "D"], "workload='D' must be one of A, B, C; try 'A'"),
        (["climb", "--workload", "A", "--scale", "2"], "scale=2 must be from 0.03125 to 1"),
        (["climb", "--scale", "0.5"], "add --workload A, B or C"),
        (["climb", "--results", "folder"], "must end in .json; try folder.json"),
        (["climb", "--max-num-seqs", "0"], "max_num_seqs=0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    result = strata(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [t for t in result.stderr.splitlines() if t.startswith("error: ")]
    assert said in line
    assert "Traceback" not in result.stderr


def test_an_unknown_flag_is_refused() -> None:
    assert strata("generate", "x", "--cuda-graf").exit_code == 2


def test_a_prompt_too_long_is_one_line(folder: Path) -> None:
    result = strata("generate", "word " * 300, "-m", folder, *QUICK)
    assert result.exit_code == 2
    assert "max_model_len" in result.stderr


# -- generate ---------------------------------------------------------------------------------------------------------


def test_text_goes_out_and_figures_go_beside_it(folder: Path) -> None:
    result = strata("generate", "the quick", "-m", folder, *QUICK)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("\n")
    assert "tok/s" not in result.stdout
    assert "prefill" in result.stderr
    assert "decode" in result.stderr


def test_json_says_the_same_text_with_figures_apart(folder: Path) -> None:
    plain = strata("generate", "the quick", "-m", folder, *QUICK)
    result = strata("generate", "the quick", "-m", folder, *QUICK, "--json", "--ignore-eos")
    found = json.loads(result.stdout)
    assert plain.stdout == found["text"] + "\n" or found["finish_reason"] == "length"
    assert len(found["token_ids"]) == found["output_tokens"] == 12
    assert found["prompt_tokens"] > 0
    assert min(found["ttft_ms"], found["prefill_tok_s"], found["decode_tok_s"]) > 0
    assert found["toggles"]["cuda_graph"] is False


def test_the_prompt_may_come_from_a_pipe(folder: Path) -> None:
    direct = strata("generate", "the quick", "-m", folder, *QUICK)
    for arguments in ([], ["-"]):
        piped = strata("generate", *arguments, "-m", folder, *QUICK, input="the quick")
        assert piped.stdout == direct.stdout


def test_seeds_repeat(folder: Path) -> None:
    warm = [a for a in QUICK if a not in ("--temperature", "0")]
    first, second = (strata("generate", "the", "-m", folder, *warm, "--seed", "7").stdout for _ in range(2))
    assert first == second


def test_a_chat_prompt_goes_through_the_template(folder: Path) -> None:
    plain, chat = (
        json.loads(strata("generate", "the", "-m", folder, *QUICK, "--json", *extra).stdout)["prompt_tokens"]
        for extra in ([], ["--chat"])
    )
    assert chat > plain


class Interrupted:
    """A stream that is interrupted after three tokens and remembers that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def __iter__(self) -> Any:
        for i in range(3):
            yield TokenEvent("r", i, f"w{i} ", i)
        raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """Just enough of an engine to be interrupted."""

    def __init__(self) -> None:
        self.stopped = Interrupted()
        self.tokenizer = SimpleNamespace(encode=lambda text: [1] * 5, chat_template=None)
        self.optimizations = SimpleNamespace(as_dict=dict)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: Any, params: SamplingParams) -> Interrupted:
        return self.stopped


def test_an_interrupt_keeps_the_text_so_far_and_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(cli, "make_engine", lambda model, **options: engine)
    result = strata("generate", "hello")
    assert result.exit_code == 130
    assert result.stdout == "w0 w1 w2 \n"
    assert "decode 3 tokens" in result.stderr
    assert "ended by abort" in result.stderr
    assert engine.stopped.closed


def test_prefill_and_decode_rates_are_kept_apart() -> None:
    made = answers.Answer(prompt_tokens=100, sent_s=10.0, first_s=10.5, last_s=12.5, token_ids=[1] * 21)
    assert made.figures() == {"ttft_ms": 500.0, "prefill_tok_s": 200.0, "decode_tok_s": 10.0}
    assert answers.Answer(5, 1.0).figures() == {"ttft_ms": None, "prefill_tok_s": None, "decode_tok_s": None}


# -- chat -------------------------------------------------------------------------------------------------------------


def test_a_piped_chat_answers_changes_toggles_and_ends(folder: Path) -> None:
    script = (
        "hello\n/set fused_kernels off\n/set max_num_seqs 0\n/stats\n/nonsense\n/set\n/reset\nagain\n/exit\nnever\n"
    )
    result = strata("chat", "-m", folder, *QUICK, input=script)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("decode") == 2, "two turns were answered and the line after /exit was not"
    assert "fused_kernels: applied, now False" in result.stdout
    assert "max_num_seqs=0 must be at least 1" in result.stdout
    assert "kv_blocks_total" in result.stdout
    assert "unknown command '/nonsense'" in result.stdout
    assert all(t.name in result.stdout for t in toggles())


def test_a_conversation_grows_and_reset_forgets_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    real = cli.answer

    def spy(engine: Any, messages: Any, params: Any, show: Any) -> Any:
        seen.append([m["role"] for m in messages])
        return real(engine, messages, params, show)

    monkeypatch.setattr(cli, "answer", spy)
    strata("chat", "-m", folder, *QUICK, "--system", "be brief", input="a\nb\n/reset\nc\n")
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]


def test_a_turn_that_does_not_fit_is_left_out_of_the_conversation(folder: Path) -> None:
    result = strata("chat", "-m", folder, *QUICK, input=f"{'word ' * 300}\nhello\n")
    assert result.exit_code == 0
    assert "error: " in result.stderr
    assert "/reset forgets" in result.stderr
    assert result.stderr.count("decode") == 1


# -- climb ------------------------------------------------------------------------------------------------------------


def test_climb_writes_a_table_a_page_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_lab.bench import climb

    asked: dict[str, Any] = {}

    def fake(model: str, *, progress: Any, stage_done: Any, say: Any, **options: Any) -> list[Any]:
        asked.update(options, model=model)
        say("at most 39 runs")
        progress("measuring", 0.5)
        conditions = {"model": model, "series": "single stream", "stage": "baseline", "kept": True, "batch": 1}
        sizes = {"prompt_tokens": 8, "output_tokens": 8, "weight_format": "bf16", "toggles": {}}
        metrics = {"output_tok_s": 12.5, "speedup_vs_before": 1.0, "speedup_vs_baseline": 1.0}
        environment = Environment.now("cpu", threads=1)
        parts = {"conditions": conditions | sizes, "metrics": metrics, "spread": Spread.of([12.5])}
        records = [environment.record("climb/baseline", script="strata climb", **parts)]
        stage_done(records)
        return records

    monkeypatch.setattr(climb, "climb", fake)
    page = tmp_path / "deep" / "page.html"
    result = strata("climb", "-m", "tiny", "--tokens", "16", "--block-size", "8", "--html", page)
    assert result.exit_code == 0, result.output
    assert asked == {"model": "tiny", "tokens": 16, "prompt_tokens": 128, "streams": 4, "rounds": 2, "block_size": 8}
    assert "baseline" in result.stdout
    assert "12.5" in result.stdout
    assert "at most 39 runs" in result.stderr
    assert "baseline" in result.stderr, "told as soon as it is measured"
    assert sorted(path.name for path in page.parent.iterdir()) == ["page.html", "page.json"]
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads((page.parent / "page.json").read_text())[0]["metrics"]["output_tok_s"] == 12.5
    again = strata("climb", "-m", "tiny", "--html", page, "--results", tmp_path / "else" / "where.json", "--json")
    assert json.loads(again.stdout)[0]["name"] == "climb/baseline"
    assert (tmp_path / "else" / "where.json").is_file()


def test_climb_hands_an_articles_workload_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strata_lab.bench import climb

    asked: dict[str, Any] = {}

    def fake(model: str, **options: Any) -> list[Any]:
        asked.update(options)
        raise ConfigError("enough")

    monkeypatch.setattr(climb, "climb", fake)
    strata("climb", "--workload", "B", "--scale", "0.25", "--cold-starts", "0", "--html", tmp_path / "page.html")
    assert {name: asked[name] for name in ("workload", "scale", "cold")} == {"workload": "B", "scale": 0.25, "cold": 0}
    assert list(tmp_path.iterdir()) == []


def test_the_climb_offers_no_flag_for_what_it_sets_itself() -> None:
    text = strata("climb", "--help").stdout
    assert "--fused-kernels" not in text
    assert "--weight-format" not in text
    assert "--max-model-len" in text
