"""Tables of `evidence.py`'s records for the documents: in full, and what the README shows of them."""

from __future__ import annotations

from collections.abc import Sequence

from strata_lab.bench.result_tables import Rec, spread
from strata_lab.config import WEIGHT_FORMATS


def gpu_summary(records: Sequence[Rec]) -> tuple[str, Rec]:
    """A line per model and format: tokens per second by number of streams at the shortest context, first tokens."""
    decode = [r for r in records if r["name"] == "decode"]
    shortest = min(r["conditions"]["context"] for r in decode)
    batches = sorted({r["conditions"]["batch"] for r in decode})
    first = {(r["conditions"]["model"], r["conditions"]["weight_format"]): r for r in records if r["name"] == "ttft"}
    lengths = _lengths(next(iter(first.values())))[:2]
    heads = ["model", "weights", "one stream", "% of roofline", *(f"{n} streams in total" for n in batches[1:])]
    heads += [f"first token after {n}, ms" for n in lengths]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for (model, weights, context), cells in _cells(decode, "context", "batch").items():
        if context != shortest:
            continue
        alone = cells[batches[0]]["metrics"]
        together = [f"{cells[n]['metrics']['output_tok_s']:.0f}" if n in cells else "" for n in batches[1:]]
        waits = [f"{first[model, weights]['metrics'][f'ttft_ms_{n}']:.0f}" for n in lengths]
        figures = [f"{alone['output_tok_s']:.0f}", f"{alone['mbu']:.0%}", *together, *waits]
        lines.append("| " + " | ".join([model, weights, *figures]) + " |")
    note = (
        f"Tokens per second behind prompts of {shortest} tokens, {decode[0]['conditions']['kv_cache_dtype']} cache, "
        "random weights of the reference geometries, every stream a text of its own:"
    )
    return "\n".join([note, "", *lines]), _of_all(records)


def gpu_table(records: Sequence[Rec]) -> tuple[str, Rec]:
    """Decode on a GPU by model, format, streams and context, then first tokens and memory."""
    decode = [r for r in records if r["name"] == "decode"]
    contexts = sorted({r["conditions"]["context"] for r in decode})
    heads = ["model", "weights", "streams", f"tok/s in total at {contexts[0]}", "slowest to fastest", "per stream"]
    heads += ["% of bare replay", "% of roofline", *(f"tok/s (% of roofline) at {c}" for c in contexts[1:])]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for (model, weights, batch), cells in _cells(decode, "batch", "context").items():
        r = cells[contexts[0]]
        m = r["metrics"]
        line = (
            f"| {model} | {weights} | {batch} | {m['output_tok_s']:.0f} | {spread(r)} | {m['tok_s_per_stream']:.0f} | "
        )
        line += f"{m['share_of_raw']:.0%} | {m['mbu']:.0%} |"
        lines.append(line + "".join(f" {_decoded(cells.get(c))} |" for c in contexts[1:]))
    note = (
        "Random weights of the reference geometries, "
        f"{decode[0]['conditions']['kv_cache_dtype']} cache, every stream a text of its own, streams all at once. "
        "Bare replay is the captured step without any host in between, over a random cache, whose rows route to more "
        "different experts than those of a text; in italics bare replays, where prompts of that length were "
        "too many."
    )
    return "\n".join([note, "", *lines, "", _first_tokens(records)]), _of_all(records)


def _cells(decode: Sequence[Rec], row: str, column: str) -> dict[tuple[str, str, int], dict[int, Rec]]:
    """(model, format, value of the condition `row`) to value of `column` to record."""
    found: dict[tuple[str, str, int], dict[int, Rec]] = {}
    for r in sorted(decode, key=lambda r: (*_by_format(r), r["conditions"][row])):
        c = r["conditions"]
        found.setdefault((c["model"], c["weight_format"], c[row]), {})[c[column]] = r
    return found


def _of_all(records: Sequence[Rec]) -> Rec:
    """For the caption: the first record, with the commits of all, since cells are measured again one by one."""
    return {**records[0], "commit": " and ".join(dict.fromkeys(r["commit"] for r in records))}


def _lengths(record: Rec) -> list[str]:
    return [key.removeprefix("ttft_ms_") for key in record["metrics"] if key.startswith("ttft_ms_")]


def _by_format(record: Rec) -> tuple[str, int]:
    return record["conditions"]["model"], WEIGHT_FORMATS.index(record["conditions"]["weight_format"])


def _decoded(record: Rec | None) -> str:
    if record is None:
        return ""
    m = record["metrics"]
    if "output_tok_s" in m:
        return f"{m['output_tok_s']:.0f} ({m['mbu']:.0%})"
    return f"*{m['raw_tok_s']:.0f} ({m['mbu_raw']:.0%})*"


def _first_tokens(records: Sequence[Rec]) -> str:
    """Time to first token of one request alone, and the memory that the card gave at most."""
    peak: dict[tuple[str, str], float] = {}
    for r in records:
        c = r["conditions"]
        key = (c["model"], c["weight_format"])
        peak[key] = max(peak.get(key, 0.0), r["metrics"].get("peak_memory_gb", 0.0))
    first = sorted((r for r in records if r["name"] == "ttft"), key=_by_format)
    lengths = _lengths(first[0])
    lines = [
        "| model | weights | " + " | ".join(f"first token after {n}, ms" for n in lengths) + " | peak memory, GiB |"
    ]
    lines.append("|---|---|" + "---:|" * (len(lengths) + 1))
    for r in first:
        c, m = r["conditions"], r["metrics"]
        figures = " | ".join(f"{m[f'ttft_ms_{n}']:.0f}" for n in lengths)
        memory = peak[(c["model"], c["weight_format"])]
        lines.append(f"| {c['model']} | {c['weight_format']} | {figures} | {memory:.0f} |")
    return "\n".join(lines)
