"""The server keeps to its own OpenAPI document, whatever is sent (schemathesis)."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as openapi

from tests.server.serving import Served

CHECKS = [
    not_a_server_error, openapi.status_code_conformance, openapi.content_type_conformance,
    openapi.response_schema_conformance, openapi.negative_data_rejection,
]  # fmt: skip
OPERATIONS = 10
ANSWERED = ("POST /v1/completions", "POST /generate")  # here random bodies hardly ever fit all rules
EXAMPLES = 8  # of each operation and mode


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_answers_are_those_of_the_document(server: Served, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    seen: dict[str, set[int]] = {}
    for found in document.get_all_operations():
        operation = found.ok()
        seen[operation.label] = set()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue
        _keep_to(server, operation, mode, seen[operation.label])
        if mode is GenerationMode.POSITIVE and operation.label in ANSWERED:
            case = operation.Case(body={"prompt": "Hello", "max_tokens": 2}, media_type="application/json")
            response = case.call(base_url=server.url, timeout=30)
            case.validate_response(response, checks=CHECKS)
            assert response.status_code == 200
    assert len(seen) == OPERATIONS
    if mode is GenerationMode.NEGATIVE:
        assert all(400 in seen[label] for label in ANSWERED), seen


def _keep_to(server: Served, operation: Any, mode: GenerationMode, statuses: set[int]) -> None:
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def law(case: Any) -> None:
        response = case.call(base_url=server.url, timeout=30)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    law()
