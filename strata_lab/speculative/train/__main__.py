"""`python -m strata_lab.speculative.train`: texts and drafts where only torch and transformers are installed.

`texts` has a target write texts into a file, in as many processes as one starts; `draft` trains on such files. With
everything installed `strata train-draft` does both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from strata_lab.settings import attribute_docs
from strata_lab.speculative.train.recipe import train_draft
from strata_lab.speculative.train.settings import Recipe
from strata_lab.speculative.train.writing import write_texts

SECONDS_BETWEEN_LINES = 5.0


class Lines:
    """Progress as lines of text, one every few seconds."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, task: str, fraction: float) -> None:
        """A line, unless there was one just now."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {fraction:4.0%} {task}\n")
            sys.stderr.flush()


def parser() -> argparse.ArgumentParser:
    """Flags of both commands, from the fields of `Recipe`."""
    top = argparse.ArgumentParser(prog="python -m strata_lab.speculative.train", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    docs = attribute_docs(Recipe)
    for name, text in (("texts", "write texts"), ("draft", "train a draft")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--out", type=Path, required=True, help="the file, or the new folder")
        command.add_argument("--resume", action="store_true", help="go on with what an interrupted call left")
        for field in dataclasses.fields(Recipe):
            flag, shown = f"--{field.name.replace('_', '-')}", docs[field.name].replace("%", "%%")
            if field.name == "data":
                command.add_argument(flag, type=Path, nargs="*", default=(), help=shown)
            else:
                command.add_argument(flag, type=type(field.default), default=field.default, help=shown)
    return top


def main(arguments: list[str]) -> int:
    """Run a command; 0, or 2 where the user is wrong."""
    given = parser().parse_args(arguments)
    try:
        values = {f.name: getattr(given, f.name) for f in dataclasses.fields(Recipe)}
        recipe = Recipe(**values | {"data": tuple(given.data)})
        if given.command == "texts":
            write_texts(recipe, given.out, recipe.make_tokens, recipe.seed, Lines())
            return 0
        done = train_draft(recipe, given.out, resume=given.resume, progress=Lines())
    except ValueError as error:  # ours, all of them: settings, files, checkpoints
        sys.stderr.write(f"error: {error}\n")
        return 2
    facts = {
        "folder": str(done.folder),
        "bytes": done.nbytes,
        "before": done.before.as_dict(),
        "after": done.after.as_dict(),
        "answers": None if done.answers is None else done.answers.as_dict(),
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
