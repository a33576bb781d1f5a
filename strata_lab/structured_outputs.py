"""What shape a request's text must have: a JSON schema, any JSON object, a regular expression, choices or a grammar.

This is the wish, checked as far as that needs no tokenizer; `grammar.py` compiles it and holds the output to it.
Torch-free.
"""

from __future__ import annotations

import json as json_package
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from strata_lab.settings import RequestError
from strata_lab.structured_schema import why_not_enforced

EXAMPLES = {
    "json": "{'type': 'object', 'properties': {'age': {'type': 'integer'}}, 'required': ['age']}",
    "json_object": "True",
    "regex": r"r'\d{3}-\d{4}'",
    "choice": "['yes', 'no']",
    "grammar": """'root ::= "yes" | "no"'""",
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of these, under vLLM's names. The whole text matches it, unless `max_tokens` ends it before.

    Attributes:
        json: a JSON schema, as a mapping, as text, or a pydantic model. Objects have no properties but those named,
            in the order given; `oneOf` is held to as `anyOf` where its branches may overlap.
        json_object: any JSON object.
        regex: the text is a full match. Anchors are implied; look-around, back references and `\\b` do not exist.
        choice: the text is one of these.
        grammar: in xgrammar's dialect of EBNF (GBNF of llama.cpp), beginning with the rule `root`.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of "
                f"{', '.join(EXAMPLES)}; try StructuredOutputs(choice={EXAMPLES['choice']})"
            )
        check = {"json": self._check_json, "choice": self._check_choice, "json_object": self._check_json_object}
        check.get(given[0], lambda: self._check_text(given[0]))()

    def _check_json(self) -> None:
        schema = self.json
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        try:
            schema = json_package.loads(schema) if isinstance(schema, str) else schema
            text = json_package.dumps(schema)
        except (ValueError, TypeError) as error:
            raise RequestError(bad("json", self.json, f"is no JSON ({error})")) from error
        if not isinstance(schema, Mapping | bool):
            raise RequestError(bad("json", self.json, "must be a JSON schema: an object"))
        if reason := why_not_enforced(schema):
            raise RequestError(bad("json", self.json, f"cannot be enforced: {reason}"))
        object.__setattr__(self, "json", text)

    def _check_choice(self) -> None:
        choices = self.choice
        good = not isinstance(choices, str) and isinstance(choices, Sequence) and choices
        if not good or any(not isinstance(c, str) or not c for c in choices or ()):
            raise RequestError(bad("choice", choices, "must be a list of texts, none of them empty"))
        object.__setattr__(self, "choice", tuple(choices or ()))

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise RequestError(bad("json_object", self.json_object, "must be True"))

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value:
            raise RequestError(bad(name, value, "must be a text that is not empty"))

    @property
    def kind(self) -> str:
        """Which one was given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))

    @property
    def key(self) -> tuple[str, str]:
        """Kind and content: equal wishes have equal keys."""
        return self.kind, json_package.dumps(getattr(self, self.kind))


def bad(kind: str, value: Any, why: str) -> str:
    """Error text for a wish: its value, what is wrong, one that works."""
    shown = repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return f"structured_outputs: {kind}={shown} {why}; try {kind}={EXAMPLES[kind]}"
