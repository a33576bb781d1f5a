"""The kernels of a decode step compiled for an RTX 4090 (sm_89): no spills, and shared memory that such a card has.

`make aot` compiles every case for three cards, which takes minutes; here stand those that a decode step launches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
DECODE = (
    r"linear/fp8-(qkv-moe|qkv-dense|o|gate-up|down|head)-(1|16)$|linear/(int8|int4)-(qkv-moe|down)-1$"
    r"|attention_decode/(window|.*-bfloat16-(bfloat16|float8_e4m3fn))$"
    r"|moe/block-(fp8|int4|int8row)-(1|8)$|sampling/.*_V151936_B1$|elementwise/"
    r"|invariant/(gate-up|down)-fp8-1$|invariant/attention-1-float8|invariant/moe-1$|sparse_attention/.*float8"
)


@pytest.mark.host  # compiles for a card that need not be there
@pytest.mark.slow
def test_decode_kernels_do_not_spill_and_fit_into_an_rtx_4090() -> None:
    command = [sys.executable, "-m", "strata_lab.kernels.gpu.aot", "--arch", "89", "--only", DECODE, "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) > 30, done.stderr
    bad = [r for r in reports if r["spilled_bytes"] or r["shared_bytes"] > 99 * 1024]
    assert bad == []
    assert done.returncode == 0, done.stderr


def test_every_file_with_cases_is_compiled() -> None:
    from pathlib import Path

    from strata_lab.kernels.gpu import aot

    files = {p.stem for p in Path(aot.__file__).parent.glob("*.py") if "def aot_cases" in p.read_text()}
    assert files - {"kv_write"} == set(aot.MODULES), "kv_write's cases are among elementwise's"
