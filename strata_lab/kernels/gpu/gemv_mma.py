"""Products of up to 16 activation rows with a quantized weight, on tensor cores and still at the speed of a GEMV.

As in gemv.py a thread asks for 16 bytes of a weight row at a time, all it will need while registers allow, before
`launch.wait`. Here these bytes go from registers to the tensor cores as they are (`mma_asm.py`): nothing is exchanged
between threads until the end, when the warps of a program, each of which has its share of the columns, are added up.

Integer codes are multiplied exactly. `mma` adds up what the four lanes of a row hold, which may be several groups of
columns; then x is laid out once per group with zeros elsewhere, in further columns of the product ("slots"), and each
column gets the scale of its group in float32. Minima are multiplied with sums of x, which `mma` finds as well.
The sum of squares for the norm is the diagonal of x @ x^T. Only x * norm is rounded, to the dtype of x.

Bytes moved: the weight once, x once per program from the cache, the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata_lab.kernels.gpu import launch
from strata_lab.kernels.gpu.gemv_mma_config import (
    TILE_BYTES,
    TILE_ROWS,
    MmaConfig,
    default_config,
    row_bytes,
    slots,
    supports,
)
from strata_lab.kernels.gpu.mma_asm import (
    ask,
    by_token,
    chain,
    codes_as_pairs,
    half_as_float,
    paired,
    spread,
    squares,
    sums,
    times,
)
from strata_lab.quant.base import LinearWeight


@triton.jit
def _weight_words(ptr, rows, chunk, e, INSIDE: tl.constexpr, STRIDE: tl.constexpr):
    """Words e of a chunk of the rows; beyond the end zeros."""
    at = chunk * 16 + e
    if INSIDE:
        return tl.load(ptr + rows * STRIDE + at, cache_modifier=".cg")
    else:
        return tl.load(ptr + rows * STRIDE + at, mask=at < STRIDE, other=0, cache_modifier=".cg")


@triton.jit
def _groups(ptr, low, high, chunk, e, like, COLS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
            SLOTS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Per element of a result tile the float16 of its row's and column's group; beyond the last that of the last."""
    COUNT: tl.constexpr = (K + GROUP - 1) // GROUP
    group = tl.minimum(chunk * COLS // GROUP + (e // 4 * 2 + e % 2) % SLOTS, COUNT - 1)
    at = tl.where(e // 2 % 2 == 0, low, high) * COUNT + group
    return ask(ptr.to(tl.pointer_type(tl.int16), bitcast=True) + at, like, ASM)


@triton.jit
def _group_words(scale_ptr, min_ptr, low, high, chunk, e, like, K: tl.constexpr, ASM: tl.constexpr):
    """Scales and minima of four groups of 32 columns to a chunk, two a word, as `spread` takes them."""
    COUNT: tl.constexpr = K // 64  # words of a row
    at = tl.where(e % 2 == 0, low, high) * COUNT + tl.minimum(chunk * 2 + e // 4 % 2, COUNT - 1)
    scale = scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
    least = min_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at
    return ask(tl.where(e % 4 < 2, scale, least), like, ASM)


@triton.jit
def _requested(w_ptr, scale_ptr, min_ptr, low, high, chunk, e, COLS: tl.constexpr, K: tl.constexpr,
               GROUP: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr, HIGH: tl.constexpr,
               INSIDE: tl.constexpr, STRIDE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """A chunk of 16 rows: tuples of tiles of the weight, its scales, its minima, and both of them packed."""
    w = (_weight_words(w_ptr, low, chunk, e, INSIDE, STRIDE),)
    if HIGH:
        w += (_weight_words(w_ptr, high, chunk, e, INSIDE, STRIDE),)
    scale, least, both = (), (), ()
    if PACKED:
        both += (_group_words(scale_ptr, min_ptr, low, high, chunk, e, w[0], K, ASM),)
    elif GROUP > 0:
        scale += (_groups(scale_ptr, low, high, chunk, e, w[0], COLS, K, GROUP, SLOTS, ASM),)
        if min_ptr is not None:
            least += (_groups(min_ptr, low, high, chunk, e, w[0], COLS, K, GROUP, SLOTS, ASM),)
    return w, scale, least, both


@triton.jit
def _x_words(ptr, r, e, chunk, limit, PART: tl.constexpr, NT: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr,
             SLOTS: tl.constexpr, INSIDE: tl.constexpr):  # fmt: skip
    """Words 4 PART.. of a lane's columns for columns 8 NT.. of the product, of `limit` rows; None: one row for all."""
    at = chunk * (COLS // 2) + e // 4 * (COLS // 8) + PART * 4 + e % 4
    n = NT * 8 + r % 8
    if limit is None:
        if INSIDE:
            return tl.load(ptr + at + r * 0)
        else:
            return tl.load(ptr + at + r * 0, mask=at + r * 0 < K // 2, other=0)
    else:
        mask = (n // SLOTS < limit) & (e // 4 * SLOTS // 4 == n % SLOTS)
        if not INSIDE:
            mask = mask & (at < K // 2)
        return tl.load(ptr + n // SLOTS * (K // 2) + at, mask=mask, other=0)


@triton.jit
def _place(first, PAIR: tl.constexpr, TILE: tl.constexpr, limit, outputs, LANES: tl.constexpr, SIDE: tl.constexpr,
           SLOTS: tl.constexpr, SILU: tl.constexpr, HIGH: tl.constexpr):  # fmt: skip
    """Column and row (of the program's block) of each result of a tile, and whether there is one."""
    if SILU:
        j = tl.arange(0, 8 * LANES * SIDE)
        mine = first + PAIR * 8 + j // (LANES * SIDE)
        token = TILE * (8 // SLOTS) + j % (LANES * SIDE)
        return mine, token, (mine < outputs) & (token < limit)
    else:
        v = tl.arange(0, 8 * LANES * 2 * SIDE)
        half = v // SIDE % 2
        mine = first + PAIR * 16 + half * 8 + v // (2 * LANES * SIDE)
        token = TILE * (8 // SLOTS) + v // (2 * SIDE) % LANES * SIDE + v % SIDE
        return mine, token, (mine < outputs) & (token < limit) & (HIGH | (half == 0))


@triton.jit
def gemv_mma_kernel(
    x_ptr, w_ptr, scale_ptr, min_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, T, N, eps,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    WARPS: tl.constexpr, PRELOAD: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
    FP16: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): `PIECES` tiles of eight output rows (gated: half as many, gate and up), x rows j * BLOCK.."""
    COLS: tl.constexpr = 32 if FORMAT == "bf16" else 128 if FORMAT == "int4" else 64  # of a tile
    STRIDE: tl.constexpr = (K + 31) // 32 * 4 if FORMAT == "int4" else K // 2 if FORMAT == "bf16" else K // 4
    TILES: tl.constexpr = COLS // 32  # of x, per tile of the weight
    CHUNKS: tl.constexpr = (K + COLS * WARPS - 1) // (COLS * WARPS)
    WHOLE: tl.constexpr = K // (COLS * WARPS)  # chunks that need no mask
    GROUPED: tl.constexpr = GROUP > 0
    SLOTS: tl.constexpr = COLS // GROUP if GROUPED and GROUP < COLS else 1
    NT: tl.constexpr = (BLOCK * SLOTS + 7) // 8
    PAIRS: tl.constexpr = (PIECES + 1) // 2
    HIGH: tl.constexpr = PIECES > 1
    PACKED: tl.constexpr = SLOTS == 4 and min_ptr is not None and K % 64 == 0  # scales with minima
    ZERO: tl.constexpr = 8 if FORMAT == "int4" and min_ptr is None else 0
    outputs = N // 2 if SILU else N

    r = tl.arange(0, 8 * WARPS)[:, None]
    e = tl.arange(0, 16)[None, :]
    first = tl.program_id(0) * (PIECES * 4 if SILU else PIECES * 8)
    low, high = (), ()
    for p in tl.static_range(PAIRS):  # what is beyond the last row is not stored
        row = first + p * (8 if SILU else 16) + r % 8
        low += (tl.minimum(row, outputs - 1),)
        high += (tl.minimum(row, outputs - 1) + outputs if SILU else tl.minimum(row + 8, outputs - 1),)
    w_ptr = w_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    skipped = tl.program_id(1) * BLOCK
    limit = T - skipped
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + skipped * (K // 2)
    if norm_ptr is not None:
        norm_ptr = norm_ptr.to(tl.pointer_type(tl.int32), bitcast=True)

    w, scale, least, both = (), (), (), ()
    for c in tl.static_range(PRELOAD):
        for p in tl.static_range(PAIRS):
            new = _requested(w_ptr, scale_ptr, min_ptr, low[p], high[p], c * WARPS + r // 8, e, COLS, K, GROUP, SLOTS,
                             PACKED, HIGH, c < WHOLE, STRIDE, ASM)  # fmt: skip
            w, scale, least, both = w + new[0], scale + new[1], least + new[2], both + new[3]
    LANES: tl.constexpr = 2 if SLOTS == 4 else 4
    SIDE: tl.constexpr = 2 if SLOTS == 1 else 1
    v = tl.arange(0, 8 * LANES * 2 * SIDE)  # results of a tile
    half = v // SIDE % 2
    row_scale, row_bias, rest = (), (), ()
    for p in tl.static_range(PAIRS):
        if SILU:
            row = tl.minimum(first + p * 8 + v // (2 * LANES * SIDE), outputs - 1) + half * outputs
        else:
            row = tl.minimum(first + p * 16 + half * 8 + v // (2 * LANES * SIDE), outputs - 1)
        if scale_ptr is not None and not GROUPED:
            row_scale += (tl.load(scale_ptr + row),)
        if bias_ptr is not None:
            row_bias += (tl.load(bias_ptr + row),)
    launch.wait(PDL)
    launch.trigger(PDL)
    if residual_ptr is not None:
        for i in tl.static_range(PAIRS * NT):
            mine, token, mask = _place(first, i // NT, i % NT, limit, outputs, LANES, SIDE, SLOTS, SILU, HIGH)
            at = (skipped + token).to(tl.int64) * outputs + mine
            rest += (tl.load(residual_ptr + at, mask=mask, other=0.0),)

    acc, square, raw, gains = (), (), (), ()
    for _ in tl.static_range(PAIRS * NT):
        acc += (tl.zeros([8 * WARPS, 16], tl.float32),)
    for _ in tl.static_range(NT):
        square += (tl.zeros([8 * WARPS, 16], tl.float32),)
    for u in tl.static_range(-AHEAD, CHUNKS * NT):
        if u + AHEAD < CHUNKS * NT:
            for i in tl.static_range(TILES):
                raw += (_x_words(x_ptr, r, e, (u + AHEAD) // NT * WARPS + r // 8, limit, i, (u + AHEAD) % NT, K,
                                 COLS, SLOTS, (u + AHEAD) // NT < WHOLE),)  # fmt: skip
                if norm_ptr is not None and (u + AHEAD) % NT == 0:
                    gains += (_x_words(norm_ptr, r, e, (u + AHEAD) // NT * WARPS + r // 8, None, i, 0, K, COLS,
                                       SLOTS, (u + AHEAD) // NT < WHOLE),)  # fmt: skip
        if u >= 0:
            if u % NT == 0:
                if u // NT + PRELOAD < CHUNKS:
                    chunk = (u // NT + PRELOAD) * WARPS + r // 8
                    for p in tl.static_range(PAIRS):
                        new = _requested(w_ptr, scale_ptr, min_ptr, low[p], high[p], chunk, e, COLS, K, GROUP, SLOTS,
                                         PACKED, HIGH, u // NT + PRELOAD < WHOLE, STRIDE, ASM)  # fmt: skip
                        w, scale, least, both = w + new[0], scale + new[1], least + new[2], both + new[3]
                if PACKED:
                    for p in tl.static_range(PAIRS):
                        one = spread(both[u // NT * PAIRS + p], ASM)
                        scale += (one[0],)
                        least += (one[1],)
                codes = ()
                for p in tl.static_range(PIECES):
                    codes += (codes_as_pairs(w[u // NT * PIECES + p], FORMAT, FP16, ZERO, ASM),)
            flat, xs, squared = (), (), square[u % NT]
            for i in tl.static_range(TILES):
                x = raw[u * TILES + i]
                if norm_ptr is not None:
                    squared = squares(squared, x, FP16, ASM)
                    x = times(x, gains[u // NT * TILES + i], FP16, ASM)
                flat += (x,)
            if FORMAT == "bf16":
                xs = flat
            else:
                for i in tl.static_range(TILES // 2):
                    xs += paired(flat[2 * i], flat[2 * i + 1], ASM)
            if min_ptr is not None:
                total = tl.zeros([8 * WARPS, 16], tl.float32)
                for i in tl.static_range(TILES // 2):
                    total = sums(total, xs[2 * i], xs[2 * i + 1], FP16, ASM)
            new, changed = (), ()
            for i in tl.static_range(PAIRS * NT):
                a = acc[i]
                if i % NT == u % NT:
                    one = codes[i // NT * (2 if HIGH else 1)]
                    two = codes[i // NT * 2 + 1] if HIGH else ()
                    if GROUPED:
                        part = chain(tl.zeros([8 * WARPS, 16], tl.float32), one, two, xs, FP16, ASM)
                    if PACKED:
                        a += scale[u // NT * PAIRS + i // NT] * part + least[u // NT * PAIRS + i // NT] * total
                    elif GROUPED:
                        a += half_as_float(scale[u // NT * PAIRS + i // NT]) * part
                        if min_ptr is not None:
                            a += half_as_float(least[u // NT * PAIRS + i // NT]) * total
                    else:
                        a = chain(a, one, two, xs, FP16, ASM)
                new += (a,)
            acc = new
            for i in tl.static_range(NT):
                changed += (squared if i == u % NT else square[i],)
            square = changed

    for i in tl.static_range(PAIRS * NT):
        y = tl.sum(tl.reshape(acc[i], [WARPS, 128]), axis=0)
        y = tl.reshape(by_token(tl.reshape(y, [8, 4, 2, 2]), SLOTS), v.shape)
        if norm_ptr is not None:
            diagonal = (e // 2 % 2 == 0) & (e // 4 * 2 + e % 2 == r % 8)
            s = tl.sum(tl.where(diagonal, square[i % NT], 0.0), axis=0)
            s = by_token(tl.sum(tl.reshape(s, [1, 4, 2, 2]), axis=2, keep_dims=True), SLOTS)
            s = tl.reshape(tl.broadcast_to(s, [8, LANES, 2, SIDE]), v.shape)
            y *= tl.rsqrt(s / K + eps)
        if scale_ptr is not None and not GROUPED:
            y *= row_scale[i // NT]
        if bias_ptr is not None:
            y += row_bias[i // NT].to(tl.float32)
        if SILU:
            y = tl.permute(tl.reshape(y, [8 * LANES, 2, SIDE]), [0, 2, 1])
            gate, up = tl.split(y)
            y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [8 * LANES * SIDE])
        mine, token, mask = _place(first, i // NT, i % NT, limit, outputs, LANES, SIDE, SLOTS, SILU, HIGH)
        at = (skipped + token).to(tl.int64) * outputs + mine
        if residual_ptr is not None:
            y += rest[i].to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def gemv_mma(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    silu_mul: bool,
    out: Tensor,
    config: MmaConfig | None = None,
) -> None:
    """`linear_triton` for a few contiguous rows x [T, K] into `out`, whose dtype the result is rounded to."""
    assert supports(x, weight, norm_weight), (x.dtype, x.shape, weight.format, weight.shape)
    (t, k), n = x.shape, weight.shape[0]
    config = config or default_config(weight, t)
    outs = config.pieces * TILE_ROWS // (2 if silu_mul else 1)
    chunks = -(-row_bytes(weight) // (TILE_BYTES * config.warps))
    unit = max(1, 8 // slots(weight))  # rows of x that fill the columns of one `mma`
    block = min(max(unit, triton.next_power_of_2(t)), config.block)
    gemv_mma_kernel[(-(-(n // 2 if silu_mul else n) // outs), -(-t // block))](
        x, weight.data, weight.scales, weight.mins, bias, norm_weight, residual, out, t, n, norm_eps,
        K=k, FORMAT=weight.format, GROUP=weight.group_size, PIECES=config.pieces, WARPS=config.warps,
        PRELOAD=min(config.preload, chunks), AHEAD=config.ahead, BLOCK=block, SILU=silu_mul,
        FP16=x.dtype == torch.float16, ASM=not launch.INTERPRETED,
        **launch.options(x.device, num_warps=config.warps, early=True),
    )  # fmt: skip
