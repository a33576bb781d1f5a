"""What cards are made of, by their makers' data sheets: memory, bandwidth, tensor throughput.

For arithmetic about cards that are not here. Data sheets promise; where the card is here, `telemetry/bandwidth.py`
measures, and "cpu" stands for this machine, measured. The sources stand in `docs/cards.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_lab.settings import ConfigError

GIB = 1 << 30
# Share of the data sheet's bandwidth that plain reading reaches: H200, 4.61 of 4.8 TB/s (read_bandwidth_tb_s in
# docs/results/evidence_gpu.json). Taken for all cards, which is an assumption.
READ_SHARE = 0.9605


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes:
        key: name on the command line.
        name: product name.
        memory_bytes: its memory.
        bandwidth_bytes_s: peak read of its memory.
        tensor_tflops: weight format to dense tensor throughput (accumulated in float32 where that differs); empty where
            nothing is claimed.
        measured: whether the bandwidth was measured here rather than taken from a data sheet.
    """

    key: str
    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    tensor_tflops: dict[str, float]
    measured: bool = False

    @property
    def read_bytes_s(self) -> float:
        """What reading can be expected to reach."""
        return self.bandwidth_bytes_s * (1.0 if self.measured else READ_SHARE)


def _sheet(key: str, name: str, gib: int, gb_s: float, bf16: float, fp8: float | None, int8: float) -> Card:
    rates = {"bf16": bf16, "int8": int8} | ({} if fp8 is None else {"fp8": fp8})
    return Card(key, name, gib * GIB, gb_s * 1e9, rates)


CARDS = {
    card.key: card
    for card in (
        _sheet("rtx4090-48g", "RTX 4090 with 48 GB (the articles')", 48, 1008, 165.2, 330.3, 660.6),
        _sheet("rtx4090", "GeForce RTX 4090", 24, 1008, 165.2, 330.3, 660.6),
        _sheet("rtx3090", "GeForce RTX 3090", 24, 936, 71.0, None, 284.0),
        _sheet("rtx5090", "GeForce RTX 5090", 32, 1792, 209.5, 419.0, 838.0),
        _sheet("a100", "A100 80GB SXM", 80, 2039, 312.0, None, 624.0),
        _sheet("h100", "H100 80GB SXM", 80, 3350, 989.4, 1978.9, 1978.9),
        _sheet("h200", "H200 141GB SXM", 141, 4800, 989.4, 1978.9, 1978.9),
        _sheet("l4", "L4", 24, 300, 121.0, 242.0, 242.0),
    )
}
CARD_NAMES = (*CARDS, "cpu")


def card(key: str) -> Card:
    """A card by its key; "cpu" is measured (a second, once per machine). `ConfigError` for an unknown one."""
    if key == "cpu":
        from strata_lab.telemetry import bandwidth, hardware

        cpu = hardware.cpu_info()
        return Card("cpu", cpu.name, cpu.memory_bytes or 0, bandwidth.ceiling("cpu").bytes_s, {}, measured=True)
    if key not in CARDS:
        raise ConfigError(f"card={key!r} must be one of {', '.join(CARD_NAMES)}; try 'rtx4090-48g'")
    return CARDS[key]
