"""Which JSON schemas can be held to: a constraint that the grammar would quietly leave out is found and named here.

The tables say what xgrammar 0.2 does, found by giving it each keyword alone and in pairs, and a text that breaks it
(`tests/test_structured_schema.py` asks again). Errors in the schema itself are found when it is compiled. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NEVER = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef")
FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uuid",
    "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
# What says something of one type only, and the keywords that imply that type.
BY_TYPE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "string": (("minLength", "maxLength", "pattern", "format"), ()),
    "array": (("minItems", "maxItems", "contains", "minContains", "maxContains"), ("items", "prefixItems")),
    "object": (
        ("required", "minProperties", "maxProperties", "propertyNames"),
        ("properties", "additionalProperties", "patternProperties"),
    ),
    "number": (("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), ()),
}
# Each stands alone: what is beside it, other than notes for people, would be left out.
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
NOTES = (
    "$schema", "$id", "$comment", "$defs", "$anchor", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "discriminator",
)  # fmt: skip
PAIRS = (("pattern", "format"), ("pattern", "minLength"), ("pattern", "maxLength"), ("format", "minLength"),
         ("format", "maxLength"), ("contains", "items"), ("contains", "prefixItems"),
         ("propertyNames", "properties"))  # fmt: skip


def why_not_enforced(schema: Mapping[str, Any] | bool) -> str | None:
    """What of a schema would be left out, and where; None where all of it is held to."""
    for path, part in _parts(schema, "$"):
        if reason := _why(part):
            return f"at {path}, {reason}"
    return None


def _why(part: Mapping[str, Any]) -> str | None:
    for name in NEVER:
        if name in part:
            return f"{name!r} has no counterpart in a grammar"
    if part.get("uniqueItems"):
        return "'uniqueItems' has no counterpart in a grammar"
    if "allOf" in part and len(part["allOf"]) != 1:
        return "'allOf' of several schemas is not combined; write one schema with all their properties"
    for name in ALONE:
        others = [k for k in part if k != name and k not in NOTES and not (k == "type" and name in ("enum", "const"))]
        if name in part and others:
            return f"{others[0]!r} beside {name!r} would be left out; put it into the schemas that {name!r} names"
    for first, second in PAIRS:
        if first in part and second in part:
            return f"{first!r} and {second!r} do not go together; use one of them"
    return _why_type(part)


def _why_type(part: Mapping[str, Any]) -> str | None:
    types = part.get("type", ())
    types = (types,) if isinstance(types, str) else tuple(types)
    for wanted, (names, implied_by) in BY_TYPE.items():
        known = wanted in types or (wanted == "number" and "integer" in types) or any(n in part for n in implied_by)
        used = [n for n in names if n in part]
        if used and not known:
            return f"{used[0]!r} needs 'type': {wanted!r} beside it"
    if part.get("format", FORMATS[0]) not in FORMATS:
        return f"format {part['format']!r} is not known; use one of {', '.join(FORMATS)}, or a pattern"
    if "multipleOf" in part and "number" in types:
        return "'multipleOf' is for 'type': 'integer'"
    return None


def _parts(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema inside a schema, with its path; what is no schema (an example, say) is not entered."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(name)
        for key, value in inner.items() if isinstance(inner, Mapping) else ():
            yield from _parts(value, f"{path}.{name}.{key}")
    for name in ("items", "contains", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
                 "propertyNames", "additionalItems"):  # fmt: skip
        yield from _parts(schema.get(name), f"{path}.{name}")
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        inner = schema.get(name)
        for index, value in enumerate(inner if isinstance(inner, list) else ()):
            yield from _parts(value, f"{path}.{name}[{index}]")
