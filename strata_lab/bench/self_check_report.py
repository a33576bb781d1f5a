"""`self_check.py`'s findings as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path

from strata_lab.bench.self_check import SelfCheck

STYLE = Path(__file__).with_name("report.css")
PROSE = ".prose th, .prose td { white-space: normal; text-align: left; vertical-align: top; min-width: 7em }"
EXPLAINED = (
    ("perplexity", "exp of the mean negative log probability of the next token: lower is better"),
    ("mean KL", "how far the candidate's probabilities are from the source's, in nats, over all positions: 0 is equal"),
    ("top-1", "share of positions at which both find the same token likeliest"),
    ("first difference", "number of the first greedy token that differs; a near tie flips early without harm"),
)


def html_page(check: SelfCheck) -> str:
    """The page as text."""
    title = f"{check.candidate} beside {check.source}"
    flags = "".join(f"<li>{escape(flag)}</li>" for flag in check.flags)
    verdict = f"<ul>{flags}</ul>" if flags else "<p>No answer goes in circles, is cut off or fails to end.</p>"
    explained = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in EXPLAINED)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}{PROSE}</style></head>\n"
        "<body><main>"
        f"<header><h1>{escape(title)}</h1></header>"
        f"<section><h2>Numbers</h2><div class=scroll>{_numbers(check)}</div></section>"
        f"<section><h2>Flags</h2>{verdict}</section>"
        f"<section><h2>Answers, greedy</h2><div class=scroll>{_answers(check)}</div></section>"
        f"<section><h2>How to read it</h2><dl>{explained}</dl></section></main></body></html>\n"
    )


def _numbers(check: SelfCheck) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(language)}</th><td>{c.tokens}</td><td>{c.reference_perplexity:.3f}</td>"
        f"<td>{c.perplexity:.3f}</td><td>{c.perplexity - c.reference_perplexity:+.3f}</td><td>{c.mean_kl:.4f}</td>"
        f"<td>{c.top1_agreement:.1%}</td></tr>"
        for language, c in check.languages.items()
    )
    heads = ("text", "tokens", "source perplexity", "perplexity", "difference", "mean KL", "top-1")
    return f"<table><thead><tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr></thead><tbody>{rows}</tbody></table>"


def _answers(check: SelfCheck) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(a.prompt)}</th><td>{_text(a.source)}</td><td>{_text(a.candidate)}</td>"
        f"<td>{'none' if a.divergence is None else a.divergence}</td><td>{escape('; '.join(a.flags))}</td></tr>"
        for a in check.answers
    )
    heads = ("prompt", "source", "candidate", "first difference", "flags")
    head = "".join(f"<th>{h}</th>" for h in heads)
    return f"<table class=prose><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _text(text: str) -> str:
    return escape(text).replace("\n", "<br>")
