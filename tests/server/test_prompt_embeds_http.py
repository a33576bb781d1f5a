"""Laws of prompt embeddings over HTTP: rows of tokens give the tokens' text, and what is no rows does nothing."""

from __future__ import annotations

import base64
import io
import json
import struct
from typing import Any

import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save

from tests.server.serving import Served

IDS = [5, 9, 11, 40, 41, 7]
HIDDEN = 64
ASK: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_safetensors(rows: torch.Tensor) -> str:
    return b64(save({"prompt_embeds": rows.contiguous()}))


def as_npy(rows: Any) -> str:
    file = io.BytesIO()
    np.save(file, np.asarray(rows))
    return b64(file.getvalue())


def npy(header: str, data: bytes = b"") -> str:
    """A NumPy file with any header."""
    text = header.encode() + b"\n"
    return b64(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)


@pytest.fixture(scope="module")
def rows(server: Served) -> torch.Tensor:
    return server.engine.embed(IDS)


@pytest.mark.parametrize(
    "write", [as_safetensors, as_npy, lambda r: as_npy(r.double()), lambda r: as_safetensors(r.double())]
)
@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_sends_rows_of_tokens_and_gets_the_tokens_text(
    write: Any, stream: bool, server: Served, rows: torch.Tensor
) -> None:
    expected = server.post("/v1/completions", prompt=IDS, **ASK).json()["choices"][0]["text"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt="", max_tokens=10, temperature=0, stream=stream,
            extra_body={"prompt_embeds": write(rows), "ignore_eos": True},
        )  # fmt: skip
        if stream:
            assert "".join(piece.choices[0].text for piece in answer) == expected
        else:
            assert answer.choices[0].text == expected and answer.usage.prompt_tokens == len(IDS)


def test_several_prompts_of_half_precision_have_several_answers(server: Served, rows: torch.Tensor) -> None:
    asked = {"prompt_embeds": [as_safetensors(rows.bfloat16()), as_npy(rows.half())], "n": 2, **ASK, "temperature": 1}
    answer = server.post("/v1/completions", **asked).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3] and answer["usage"]["prompt_tokens"] == 2 * len(IDS)


ZEROS = torch.zeros(2, HIDDEN)


def as_pickle(new: bool) -> str:
    file = io.BytesIO()
    torch.save(ZEROS, file, _use_new_zipfile_serialization=new)
    return b64(file.getvalue())


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 64)}"
OBJECT = "{'descr': '|O', 'fortran_order': False, 'shape': (2, 64)}"
LYING = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40, 64], "data_offsets": [0, 1 << 48]}}).encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_embeds": "???"}, "not base64"), ({"prompt_embeds": ""}, "neither"),
        ({"prompt_embeds": as_pickle(True)}, "never opened"),
        ({"prompt_embeds": as_pickle(False)}, "never opened"), ({"prompt_embeds": b64(b"\x80\x02}q.")}, "neither"),
        ({"prompt_embeds": npy(HUGE, bytes(512))}, "512 bytes"), ({"prompt_embeds": npy(OBJECT)}, "floating point"),
        ({"prompt_embeds": npy("[" * 900)}, "neither"), ({"prompt_embeds": npy("x" * 5000)}, "neither"),
        ({"prompt_embeds": b64(struct.pack("<Q", len(LYING)) + LYING)}, "neither"),
        ({"prompt_embeds": b64(save({"a": ZEROS, "b": ZEROS.clone()}))}, "2 tensors"),
        ({"prompt_embeds": as_safetensors(torch.zeros(2, HIDDEN + 1))}, f"must be [tokens, {HIDDEN}]"),
        ({"prompt_embeds": as_safetensors(torch.zeros(2, HIDDEN, dtype=torch.int32))}, "floating"),
        ({"prompt_embeds": as_safetensors(torch.zeros(HIDDEN))}, "must be"),
        ({"prompt_embeds": as_safetensors(torch.zeros(128, HIDDEN))}, "at most 127"),
        ({"prompt_embeds": as_safetensors(torch.full((2, HIDDEN), float("inf")))}, "not finite"),
        ({"prompt_embeds": as_safetensors(torch.zeros(0, HIDDEN))}, "must be"), ({"prompt_embeds": []}, "at least 1"),
        ({"prompt_embeds": as_safetensors(ZEROS), "prompt": "x"}, "leave out prompt"),
        ({"prompt_embeds": as_safetensors(ZEROS), "echo": True}, "leave out echo"),
        ({"prompt_embeds": as_safetensors(ZEROS), "repetition_penalty": 1.1}, "presence_penalty"),
        ({}, "prompt is missing"),
    ],
)  # fmt: skip
def test_what_is_no_rows_is_refused_and_says_what_works(fields: Any, message: str, server: Served) -> None:
    answer = server.post("/v1/completions", **ASK | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["type"] == "invalid_request_error"
    assert server.blocks_used() == 0
