"""Laws of JSON schemas: what is accepted is held to, what would be left out is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import xgrammar

from strata_lab.sampling_params import RequestError, StructuredOutputs
from strata_lab.structured_schema import FORMATS, why_not_enforced

TEXT = {"type": "string"}
INT = {"type": "integer"}
A = {"properties": {"a": TEXT}}
INFO = xgrammar.TokenizerInfo(
    [bytes([i]) for i in range(256)] + [b"</s>"], xgrammar.VocabType.RAW, stop_token_ids=[256]
)
COMPILER = xgrammar.GrammarCompiler(INFO, max_threads=1)

# A schema and a JSON text that breaks it, for everything that is held to.
HELD_TO: dict[str, tuple[Any, str]] = {
    "type": (INT, '"a"'),
    "several types": ({"type": ["string", "null"]}, "1"),
    "minimum": ({**INT, "minimum": 5}, "4"),
    "maximum": ({"type": "number", "maximum": 5.5}, "6.1"),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 5}, "5.0"),
    "multipleOf": ({**INT, "multipleOf": 5}, "4"),
    "pattern": ({**TEXT, "pattern": "^a$"}, '"b"'),
    "minLength": ({**TEXT, "minLength": 2}, '"b"'),
    "maxLength": ({**TEXT, "maxLength": 1}, '"bb"'),
    "minItems": ({"type": "array", "items": {}, "minItems": 2}, "[1]"),
    "maxItems": ({"type": "array", "items": TEXT, "maxItems": 1}, '["a", "b"]'),
    "items": ({"items": INT}, '["a"]'),
    "prefixItems": ({"type": "array", "prefixItems": [TEXT], "items": False}, "[1]"),
    "contains": ({"type": "array", "contains": INT}, '["a"]'),
    "required": ({"type": "object", **A, "required": ["a"]}, "{}"),
    "properties": ({**A, "required": ["a"]}, '{"a": 1}'),
    "other properties": ({"type": "object", **A}, '{"b": 1}'),
    "additionalProperties": ({"additionalProperties": False}, '{"a": 1}'),
    "patternProperties": ({"patternProperties": {"^a$": INT}, "additionalProperties": False}, '{"b": 1}'),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a$", "type": "string"}}, '{"b": 1}'),
    "minProperties": ({"type": "object", "minProperties": 1, "additionalProperties": TEXT}, "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1, "additionalProperties": TEXT}, '{"a": "x", "b": "y"}'),
    "enum": ({"enum": [1]}, "2"),
    "const": ({"const": 1}, "2"),
    "anyOf": ({"anyOf": [INT, TEXT]}, "true"),
    "oneOf": ({"oneOf": [INT, TEXT]}, "true"),
    "allOf of one": ({"allOf": [{**INT, "minimum": 5}]}, "4"),
    "$ref": ({"$defs": {"n": INT}, "$ref": "#/$defs/n"}, '"a"'),
    **{f"format {name}": ({**TEXT, "format": name}, '"\\u0001 hello \\" "') for name in FORMATS},
}
# A schema with something that would be left out, a text that breaks it, and what the error names.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "not": ({"not": TEXT}, '"a"', "'not'"),
    "if": ({"type": "object", **A, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": "x"}', "'if'"),
    "dependentRequired": ({"type": "object", **A, "dependentRequired": {"a": ["b"]}}, '{"a": "x"}', "dependentRequ"),
    "uniqueItems": ({"type": "array", "items": TEXT, "uniqueItems": True}, '["a","a"]', "'uniqueItems'"),
    "allOf of two": ({"allOf": [INT, {"minimum": 5}]}, "4", "'allOf'"),
    "beside allOf": ({**INT, "allOf": [{"minimum": 5}]}, "4", "beside 'allOf'"),
    "beside $ref": ({"$defs": {"s": INT}, "$ref": "#/$defs/s", "minimum": 5}, "4", "beside '$ref'"),
    "beside anyOf": ({"type": "object", **A, "anyOf": [{"required": ["b"]}]}, '{"a": "x"}', "beside 'anyOf'"),
    "minimum without a type": ({"minimum": 5}, "4", "'minimum' needs 'type': 'number'"),
    "pattern without a type": ({"pattern": "^a$"}, '"b"', "'pattern' needs 'type': 'string'"),
    "minItems without a type": ({"minItems": 2}, "[1]", "'minItems' needs 'type': 'array'"),
    "required without a type": ({"required": ["a"]}, "{}", "'required' needs 'type': 'object'"),
    "an unknown format": ({**TEXT, "format": "nonsense"}, '"hello"', "format 'nonsense'"),
    "multipleOf of a number": ({"type": "number", "multipleOf": 0.5}, "0.3", "'multipleOf'"),
    "pattern and length": ({**TEXT, "pattern": "^a*$", "minLength": 3}, '"a"', "'minLength'"),
    "contains and items": ({"type": "array", "items": TEXT, "contains": {"const": "x"}}, '["a"]', "'contains'"),
    "names and properties": (
        {"type": "object", **A, "propertyNames": {"type": "string", "pattern": "^b$"}}, '{"a": "x"}', "'propertyNames'",
    ),
}  # fmt: skip


def accepts(schema: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize("name", HELD_TO)
def test_what_is_accepted_is_held_to(name) -> None:
    schema, text = HELD_TO[name]
    json.loads(text)
    assert why_not_enforced(schema) is None
    assert not accepts(schema, text)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_left_out_is_refused_by_name_wherever_it_stands(name) -> None:
    schema, text, match = REFUSED[name]
    assert accepts(schema, text), "it is held to by now: the table is out of date"
    for outer in (schema, {"type": "object", "properties": {"x": schema}}, {"anyOf": [TEXT, schema]}):
        with pytest.raises(RequestError, match=re.escape(match)) as caught:
            StructuredOutputs(json=outer)
        assert "try json=" in str(caught.value)


def test_notes_for_people_and_examples_are_no_constraints() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "type": "object",
        "$defs": {"Size": {"enum": ["s", "m"], "type": "string", "title": "Size"}},
        "properties": {
            "size": {"$ref": "#/$defs/Size", "description": "not a constraint", "default": "s"},
            "not": {**TEXT, "examples": [{"not": 1}]},
            "maybe": {"anyOf": [INT, {"type": "null"}], "default": None, "title": "Maybe"},
        },
        "required": ["size"],
    }  # fmt: skip
    assert why_not_enforced(schema) is None
    assert accepts(schema, '{"size": "m", "not": "x", "maybe": null}') and not accepts(schema, '{"size": "l"}')


def test_a_pydantic_model_is_its_schema() -> None:
    import pydantic

    class City(pydantic.BaseModel):
        name: str
        people: int | None = None

    assert json.loads(StructuredOutputs(json=City).json) == City.model_json_schema()


@pytest.mark.parametrize(
    ("wish", "match"),
    [
        ({}, "nothing; give exactly one of json, json_object, regex, choice, grammar"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json": "{"}, "is no JSON"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json": {"type": object()}}, "is no JSON"),
        ({"choice": []}, "list of texts"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": ["yes", ""]}, "none of them empty"),
        ({"regex": 5}, "must be a text"),
        ({"grammar": ""}, "must be a text"),
        ({"json_object": 1}, "must be True"),
    ],
)
def test_a_malformed_wish_is_refused_with_one_that_works(wish, match) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        StructuredOutputs(**wish)
    assert "try " in str(caught.value)


def test_equal_wishes_have_equal_keys() -> None:
    assert StructuredOutputs(json={"type": "object"}).key == StructuredOutputs(json='{"type": "object"}').key
    assert StructuredOutputs(choice=["a"]).key == StructuredOutputs(choice=("a",)).key
    assert StructuredOutputs(regex="a").key != StructuredOutputs(grammar="a").key
