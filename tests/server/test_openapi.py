"""Requests made up from the server's own OpenAPI document: no fault, and nothing the document does not say."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from .conftest import Running

schemathesis = pytest.importorskip("schemathesis", reason="the schemathesis package is not installed")

EXAMPLES = 25
POST = ["/v1/chat/completions", "/v1/completions", "/tokenize"]
GET = ["/v1/models", "/v1/models/{name}", "/health", "/metrics"]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        *((path, "POST", mode) for path in POST for mode in (POSITIVE, NEGATIVE)),
        *((path, "GET", POSITIVE) for path in GET),
    ],
)
def test_the_document_holds(served: Running, path: str, method: str, mode: schemathesis.GenerationMode) -> None:
    operation = schemathesis.openapi.from_url(served.url + "/openapi.json")[path][method]
    # A well-formed request can still ask for another model, or for more than the context holds.
    excluded = [schemathesis.checks.positive_data_acceptance]

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(excluded_checks=excluded)

    check()


def test_every_endpoint_is_tested(served: Running) -> None:
    paths = served.client.get(served.url + "/openapi.json").json()["paths"]
    assert {(path, method.upper()) for path in paths for method in paths[path]} == {
        *((path, "POST") for path in POST),
        *((path, "GET") for path in GET),
    }
