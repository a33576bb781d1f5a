"""The house rules that a reader relies on, checked on the syntax tree and in clean interpreters."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_lab.config import toggles

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "strata_lab"
WIDGETS = ROOT / "widgets" / "strata_widgets"

TORCH_FREE = (
    "config", "request", "events", "apply", "explain", "stats", "block_manager", "prefix_cache", "batch", "admission",
    "waiting_queue", "capacity", "preemption", "roster", "scheduler", "snapshot",
    "draft_events", "expert_events", "telemetry.achieved", "workbench.session",
    "speculative.window", "speculative.ngram", "speculative.policy", "speculative.speculator",
    "speculative.base", "speculative.traffic", "speculative.train.settings",
)  # fmt: skip
# Packages the core may use; everything else that the project depends on must be imported lazily or outside the core.
CORE_PACKAGES = {"torch", "triton", "transformers", "safetensors", "tokenizers", "numpy"}
NOT_CORE = ("server", "workbench", "cli", "lessons")
IMPORT_NAME = {
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
    "llama-cpp-python": "llama_cpp",
    "pyyaml": "yaml",
}
SECONDS_TO_IMPORT = 0.3

MAX_LINES = 350
# path -> why it may be longer
LONG_FILES: dict[str, str] = {}

# "file: expression" that reads a toggle outside build.py and config.py -> why.
TOGGLE_READS = {
    "strata_lab/engine.py: self.optimizations.weight_format": "shown in its repr",
    "strata_lab/lessons/lesson.py: self.engine.optimizations.weight_format": "told to the reader",
    "strata_lab/weight_exchange.py: current.optimizations.weight_format": "whether other weights are to be loaded",
}
# Files that may write to standard output -> why.
PRINTERS: dict[str, str] = {
    "strata_lab/bench/kernels_cpu.py": "a command of its own; the table is its output",
    "strata_lab/bench/evidence.py": "a command of its own; a line per cell, as soon as it is measured",
    "strata_lab/bench/gpu_session.py": "a command of its own; a line before and after each stage",
    "strata_lab/kernels/gpu/aot.py": "a command of its own; the table is its output",
}
# Files that may touch the environment -> why.
ENVIRONMENT_USERS: dict[str, str] = {
    "strata_lab/graph_runner.py": "tells inductor to keep its cache beside ours; it takes the folder from nowhere else",
    "strata_lab/bench/harness.py": "is told the commit of a copied tree, which then stands in its records",
    "strata_lab/bench/lab_page.py": "hands a notebook server of its own settings of its own",
}


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> Iterator[str]:
    """Full dotted names a file imports anywhere, lazy imports included."""
    home = WIDGETS.parent if path.is_relative_to(WIDGETS) else ROOT
    package = path.relative_to(home).parent.parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*prefix, node.module or ""]).rstrip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported(path))


def run_python(code: str, *arguments: str) -> str:
    """Run code in a clean interpreter; its output, or a failed test that shows what went wrong."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def core_modules() -> list[str]:
    names = []
    for path in python_files(PACKAGE):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] not in NOT_CORE and parts[-1] != "__main__":
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


def distributions_beyond_core() -> set[str]:
    """Import names of everything pyproject.toml asks for, less the core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    names = {re.split(r"[\s\[<>=!;~]", requirement)[0].lower() for requirement in requirements} - {"strata-lab"}
    return {IMPORT_NAME.get(name, name.replace("-", "_")) for name in names} - CORE_PACKAGES


# -- who may import whom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_bookkeeping_loads_without_torch(module: str) -> None:
    loaded = run_python(f"import sys, strata_lab.{module}; print('torch' in sys.modules)")
    assert loaded.strip() == "False"


def test_widgets_know_neither_torch_nor_the_engine() -> None:
    guilty = [relative(p) for p in python_files(WIDGETS) if uses(p, "torch") or uses(p, "strata_lab")]
    assert guilty == []


def test_only_the_workbench_knows_the_widgets() -> None:
    guilty = [
        relative(p)
        for p in python_files(PACKAGE)
        if uses(p, "strata_widgets") and p.relative_to(PACKAGE).parts[0] != "workbench"
    ]
    assert guilty == []


def test_layers_call_operators_and_never_triton() -> None:
    guilty = [relative(p) for p in python_files(PACKAGE / "layers") if uses(p, "triton")]
    assert guilty == []


def test_the_engine_knows_no_user_interface() -> None:
    """Charts, commands and the server reach the engine; nothing under them reaches back."""
    above = ("strata_lab.cli", "strata_lab.server", "strata_lab.workbench", "strata_lab.bench", "strata_lab.lessons")
    top = [p for p in python_files(PACKAGE) if p.relative_to(PACKAGE).parts[0] not in (*NOT_CORE, "bench")]
    assert [f"{relative(p)} imports {name}" for p in top for name in above if uses(p, name)] == []


def test_importing_the_package_is_instant_and_loads_no_torch() -> None:
    code = """
        import sys, time
        started = time.perf_counter()
        import strata_lab
        print(time.perf_counter() - started, "torch" in sys.modules)
    """
    seconds, torch_loaded = run_python(code).split()
    assert torch_loaded == "False"
    assert float(seconds) < SECONDS_TO_IMPORT


def test_the_package_offers_exactly_its_public_names() -> None:
    import strata_lab

    assert set(strata_lab.__all__) <= set(dir(strata_lab))
    assert all(getattr(strata_lab, name) is not None for name in strata_lab.__all__)
    with pytest.raises(AttributeError, match="it offers"):
        _ = strata_lab.LLMEngin


def test_the_core_imports_where_only_the_core_packages_exist() -> None:
    """A GPU server has torch and transformers, but no notebook, no web server and no terminal toys."""
    code = """
        import importlib, importlib.abc, sys
        blocked, modules = set(sys.argv[1].split(",")), sys.argv[2].split(",")

        class Absent(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in blocked:
                    raise ModuleNotFoundError(f"{name} is not a core package: import it where it is used", name=name)

        import torch, transformers  # what these two import by themselves is not our concern
        blocked -= {name.split(".")[0] for name in sys.modules}
        sys.meta_path.insert(0, Absent())
        for module in modules:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                print(f"{module}: {error}")
    """
    blocked = distributions_beyond_core() | {"strata_widgets"}
    assert run_python(code, ",".join(sorted(blocked)), ",".join(core_modules())).splitlines() == []


# -- toggles ----------------------------------------------------------------------------------------------------------


def toggle_reads(path: Path) -> Iterator[str]:
    """Reads of a toggle: an on/off toggle's name anywhere, or a choice's name on something called optimizations.

    Numbers such as `max_num_seqs` are passed through to the objects they bound, so reading one proves nothing.
    """
    switches = {t.name for t in toggles() if t.kind == "bool"}
    choices = {t.name for t in toggles() if t.kind == "choice"}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            on_optimizations = re.search(r"(optimizations|toggles|opts)$", ast.unparse(node.value))
            if node.attr in switches or (node.attr in choices and on_optimizations):
                yield f"{relative(path)}: {ast.unparse(node)}"
        is_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        if is_getattr and {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)} & switches:
            yield f"{relative(path)}: {ast.unparse(node)}"


def test_toggles_are_read_only_where_objects_are_chosen() -> None:
    choosers = {"strata_lab/build.py", "strata_lab/resolve.py", "strata_lab/config.py"}
    reads = {read for p in python_files(PACKAGE) if relative(p) not in choosers for read in toggle_reads(p)}
    assert sorted(reads - set(TOGGLE_READS)) == []
    assert sorted(set(TOGGLE_READS) - reads) == [], "an exception that is no longer needed"


# -- style that a linter does not know --------------------------------------------------------------------------------


def test_no_file_outgrows_its_budget() -> None:
    sources = [p for folder in (PACKAGE, WIDGETS) for kind in ("*.py", "*.js", "*.css") for p in folder.rglob(kind)]
    sources += [p for kind in ("*.cpp", "*.h") for p in PACKAGE.rglob(kind)]
    lines = {relative(p): len(p.read_text(encoding="utf-8").splitlines()) for p in sources}
    assert {p: n for p, n in lines.items() if n > MAX_LINES and p not in LONG_FILES} == {}
    assert [p for p in LONG_FILES if lines.get(p, 0) <= MAX_LINES] == [], "an exception that is no longer needed"


def test_no_module_is_named_for_what_it_is_not() -> None:
    vague = {"utils", "util", "common", "misc", "helpers", "helper"}
    assert [
        relative(p) for p in python_files(PACKAGE) + python_files(WIDGETS) if vague & set(p.with_suffix("").parts)
    ] == []


def test_every_module_says_what_it_is() -> None:
    empty_marker = [p for p in python_files(PACKAGE) + python_files(WIDGETS) if p.read_text().strip()]
    assert [relative(p) for p in empty_marker if not ast.get_docstring(tree(p))] == []


def calls(path: Path, name: str) -> bool:
    nodes = ast.walk(tree(path))
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in nodes)


def test_library_code_does_not_print() -> None:
    assert [relative(p) for p in python_files(PACKAGE) if calls(p, "print") and relative(p) not in PRINTERS] == []


def test_no_environment_variable_changes_behaviour() -> None:
    pattern = re.compile(r"\bos\.(environ|getenv|putenv)\b")
    users = [relative(p) for p in python_files(PACKAGE) + python_files(WIDGETS) if pattern.search(p.read_text())]
    assert sorted(set(users) - set(ENVIRONMENT_USERS)) == []


def test_every_exception_to_a_rule_is_still_needed() -> None:
    for table in (LONG_FILES, PRINTERS, ENVIRONMENT_USERS):
        for path, reason in table.items():
            assert (ROOT / path).is_file(), f"{path} is gone; drop its exception"
            assert len(reason) > 10, f"{path}: say why"
    assert [p for p in PRINTERS if not calls(ROOT / p, "print")] == []
