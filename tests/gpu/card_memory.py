"""What this process holds of a card's memory, as torch's allocator counts it: other programs change nothing.

Graphs' private pools are in it. What is not: code of kernels, graphs as the driver keeps them, libraries' handles.
To be called when nothing that was captured will be replayed again: captured products may use cuBLAS' workspaces, one to
a stream, which are given back first, so that streams which come and go do not count as leaks.
"""

from __future__ import annotations

import gc

import torch


def allocated() -> int:
    """Bytes in living tensors."""
    _settle()
    return torch.cuda.memory_allocated()


def reserved() -> int:
    """Bytes that torch holds, of graphs' pools and of segments that are partly used."""
    _settle()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
