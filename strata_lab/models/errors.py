"""The error of every checkpoint reader. Torch-free, so that looking for a model costs nothing."""

from __future__ import annotations

from pathlib import Path

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file, the tensor or key, what was expected and the fix."""


def refuse_pickle(path: Path, reason: str = "") -> CheckpointError:
    """Why a pickled file is not read (`reason`: none but a folder's pytorch_model.bin is), and what to do."""
    reason = reason or "only the pytorch_model.bin files of a model's folder are read"
    return CheckpointError(
        f"{path} is a pickle: opening it could run any code in it, so nothing but plain tensors is taken from one, and "
        f"{reason}. Use the model's .safetensors files, or convert it where you trust it: load it with torch, write it "
        "with safetensors.torch.save_file"
    )
