"""Why an upstream test ends otherwise with the fixes than without, and why that is right."""

from __future__ import annotations

# Regular expression on "<version> <test id> <why it failed>" → explanation for the report.
EXPLANATIONS: dict[str, str] = {
    r"::test_adapter_free_lookup_locks_key_matches_lookup AttributeError: .* '_asked'": (
        "the test makes the adapter without its constructor, in which the guard begins to count"
    ),
}
