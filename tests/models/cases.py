"""Every published quantization that is read: its config, who packs it, and what the engine's weight must be."""

from __future__ import annotations

import numpy as np

from tests.models import published as pub

WIDE = {"hidden_size": 160, "intermediate_size": 288}  # 160 = 128 + 32: ragged in groups and blocks of 128
SCATTER = np.random.default_rng(3)


def scattered(shape, rng):
    return pub.gptq(shape, rng, order=SCATTER.permutation(shape[1]))


def in_swapped_groups(shape, rng):
    """Whole groups of 32 columns in another order: `desc_act` with groups fixed beforehand."""
    order = np.arange(shape[1]).reshape(-1, 32)[::-1].reshape(-1)
    return pub.gptq(shape, rng, order=order)


def row_scales(form, kind, bits, **more):
    return pub.ct_config(form, num_bits=bits, type=kind, strategy="channel", symmetric=True, **more)


def in_groups(bits, size, symmetric):
    return pub.ct_config(
        "pack-quantized", num_bits=bits, type="int", strategy="group", group_size=size, symmetric=symmetric
    )


def with_options(maker, **options):
    return lambda shape, rng: maker(shape, rng, **options)


# name -> (config, maker, format, group size, has minima)
CASES = {
    "gptq v1": (pub.gptq_config(), pub.gptq, "int4", 32, True),
    "gptq v2": (pub.gptq_config(checkpoint_format="gptq_v2"), with_options(pub.gptq, v2=True), "int4", 32, True),
    "gptq sym": (pub.gptq_config(sym=True), with_options(pub.gptq, sym=True), "int4", 32, False),
    "gptq 64": (pub.gptq_config(group_size=64), with_options(pub.gptq, group_size=64), "int4", 64, True),
    "gptq 128": (pub.gptq_config(group_size=128), with_options(pub.gptq, group_size=128), "int4", 128, True),
    "gptq rows": (pub.gptq_config(group_size=-1), with_options(pub.gptq, group_size=-1), "int4", 128, True),
    "gptq groups swapped": (pub.gptq_config(desc_act=True), in_swapped_groups, "int4", 32, True),
    "gptq desc_act": (pub.gptq_config(desc_act=True), scattered, "fp32", 0, False),
    "gptq 8 bit": (pub.gptq_config(bits=8, sym=True), with_options(pub.gptq, bits=8, sym=True), "int8", 32, False),
    "gptq 8 bit rows": (
        pub.gptq_config(bits=8, group_size=-1, sym=True), with_options(pub.gptq, bits=8, group_size=-1, sym=True),
        "int8", 0,
        False,
    ),
    "gptq 8 bit asym": (pub.gptq_config(bits=8), with_options(pub.gptq, bits=8), "fp32", 0, False),
    "awq": (pub.AWQ_CONFIG, pub.awq, "int4", 32, True),
    "awq 64": (pub.AWQ_CONFIG | {"group_size": 64}, with_options(pub.awq, group_size=64), "int4", 64, True),
    "fp8 block": (pub.FP8_CONFIG, pub.fp8, "fp8", 128, False),
    "fp8 tensor": (
        pub.FP8_CONFIG | {"weight_block_size": None}, with_options(pub.fp8, kind="tensor", scale="weight_scale"), "fp8",
        0, False,
    ),
    "ct fp8 channel": (
        row_scales("float-quantized", "float", 8), with_options(pub.fp8, kind="channel", scale="weight_scale"), "fp8",
        0, False,
    ),
    "ct fp8 block": (
        pub.ct_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        with_options(pub.fp8, scale="weight_scale"), "fp8", 128, False,
    ),
    "ct int4": (in_groups(4, 32, True), pub.packed, "int4", 32, False),
    "ct int4 asym": (in_groups(4, 64, False), with_options(pub.packed, group_size=64, sym=False), "int4", 64, True),
    "ct int4 128": (in_groups(4, 128, True), with_options(pub.packed, group_size=128), "int4", 128, False),
    "ct int4 rows": (
        row_scales("pack-quantized", "int", 4), with_options(pub.packed, group_size=-1), "int4", 128, False,
    ),
    "ct int8 packed": (in_groups(8, 32, True), with_options(pub.packed, bits=8), "int8", 32, False),
    "ct int8": (row_scales("int-quantized", "int", 8), pub.int8, "int8", 0, False),
}  # fmt: skip
