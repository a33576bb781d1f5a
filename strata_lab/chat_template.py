"""Renders a model's jinja2 chat template in a sandbox, with the names that templates on the Hugging Face hub expect.

A template comes with the model and is not trusted: it can neither reach Python objects nor change its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from strata_lab.sampling_params import RequestError


@lru_cache(maxsize=16)
def _compile(source: str) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`, which marks text for training; here it is just its content."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def render(
    source: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **variables: Any
) -> str:
    """The text a template makes of the messages. Raises `RequestError` with the template's own words if it refuses."""
    from jinja2 import TemplateError

    try:
        return _compile(source).render(messages=[dict(m) for m in messages], tools=tools, documents=None, **variables)
    except (TemplateError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise RequestError(
            f"the model's chat template refused the messages: {error}; "
            "try one user message, [{'role': 'user', 'content': 'Hello'}]"
        ) from error
