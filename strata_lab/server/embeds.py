"""Prompt embeddings in a body: base64 of a file that holds one tensor, by vLLM's name `prompt_embeds`.

Safetensors and NumPy's format are taken: both are numbers behind a short header, and the header is held to the length
of what came, so a small body cannot ask for much memory. What `torch.save` writes is a pickle, which is a program; it
is refused and never opened.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import Any

import numpy as np

from strata_lab.server.errors import ApiError, bad

FIELD = "prompt_embeds"
NPY_MAGIC = b"\x93NUMPY"
NPY_HEADER_BYTES = 1024
PICKLES = (b"PK\x03\x04", b"\x80\x02\x8a")  # what torch.save writes: a zip archive of pickles, formerly bare ones
HOW = "try base64.b64encode(safetensors.torch.save({'prompt_embeds': rows}))"


def decode(text: str, hidden_size: int, max_rows: int) -> Any:
    """The rows of one prompt, [tokens, hidden].

    Args:
        text: base64 of the file.
        hidden_size: numbers in a row.
        max_rows: most rows that a prompt can have.

    Raises:
        ApiError: it is no such file, or no such rows.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(f"is not base64 ({error})") from error
    if data.startswith(PICKLES):
        raise _bad("is a file of torch.save, which holds a program (pickle) and is never opened")
    try:
        rows = _of_npy(data) if data.startswith(NPY_MAGIC) else _of_safetensors(data)
    except ApiError:
        raise
    except Exception as error:  # their readers raise what they like for broken files
        raise _bad(f"is neither a safetensors nor a NumPy file ({type(error).__name__}: {str(error)[:120]})") from error
    if rows.ndim == 2 and rows.shape[0] > max_rows:
        raise bad(f"{FIELD} has {rows.shape[0]} rows; with max_model_len a prompt has at most {max_rows}", FIELD)
    if rows.ndim != 2 or rows.shape[1] != hidden_size or not rows.is_floating_point():
        shape = list(rows.shape)
        raise bad(f"{FIELD} of shape {shape} and {rows.dtype} must be [tokens, {hidden_size}] floating point", FIELD)
    return rows


def _of_safetensors(data: bytes) -> Any:
    from safetensors.torch import load

    tensors = load(data)
    if len(tensors) != 1:
        raise _bad(f"holds {len(tensors)} tensors in place of one")
    return next(iter(tensors.values()))


def _of_npy(data: bytes) -> Any:
    import torch

    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise _bad(f"is a NumPy file of version {version} in place of (1, 0), which numpy.save writes")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=NPY_HEADER_BYTES)
    if dtype.kind != "f" or not dtype.isnative or dtype.itemsize > 8 or by_column:
        raise _bad(f"holds {dtype} {'by columns ' if by_column else ''}in place of floating point numbers by rows")
    rest = memoryview(data)[file.tell() :]
    if math.prod(shape) * dtype.itemsize != len(rest):
        raise _bad(f"says shape {list(shape)} and holds {len(rest)} bytes of {dtype}")
    return torch.from_numpy(np.frombuffer(rest, dtype).reshape(shape).copy())


def _bad(what: str) -> ApiError:
    return bad(f"{FIELD} {what}; {HOW}", FIELD)
