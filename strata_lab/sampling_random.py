"""Random numbers of sampling: one uniform per request seed and output position, by hashing. Torch-free.

There is no generator and so no state to save, share or replay: the number depends on the seed and the position alone,
not on batch mates, preemption, device or how many numbers others drew. Not for cryptography.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# splitmix64 (Steele, Lea and Flood 2014): the increment is 2^64 divided by the golden ratio, made odd.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_DOUBLE_BITS = 53  # significant bits of a float64


def splitmix64(x: np.ndarray) -> np.ndarray:
    """splitmix64's mixing function, a bijection of 64-bit numbers: uint64 [n] -> uint64 [n]."""
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIER_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIER_2
    return x ^ (x >> np.uint64(31))


def seed_keys(seeds: Sequence[int]) -> np.ndarray:
    """Start of each seed's sequence, uint64 [n].

    Seeds are hashed too, so that sequences of neighbouring seeds are not shifted copies of each other.
    """
    return splitmix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _INCREMENT)


def child_seed(seed: int, index: int) -> int:
    """Seed of text `index` of several of one prompt: `seed` itself for the first, 63 bits."""
    if index == 0:
        return seed
    start = np.array([seed % 2**64], dtype=np.uint64) + np.array([index], dtype=np.uint64) * _INCREMENT
    return int(splitmix64(splitmix64(start))[0] >> np.uint64(1))


def uniforms(keys: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each key of `seed_keys` and output position >= 0, float64 [n]."""
    counters = keys + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * _INCREMENT
    return (splitmix64(counters) >> np.uint64(64 - _DOUBLE_BITS)) * 2.0**-_DOUBLE_BITS
