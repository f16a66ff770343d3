"""Why an upstream test ends otherwise with the fixes than without, and why that is right."""

from __future__ import annotations

# Regular expression on "<version> <test id> <why it failed>" → explanation for the report.
EXPLANATIONS: dict[str, str] = {
    r"::test_wait_for_save_skips_desynced_request_and_keeps_engine_alive .*desync warning": (
        "B11 keeps a request with fewer slots than tokens from `wait_for_save`, so LMCache never "
        "logs its own warning, which the test also asks for. What the test is about still holds: "
        "nothing is stored, and the pins are released. In an engine `start_load_kv`, which the "
        "test does not call, comes first and logs the request as an error of the connector."
    ),
}
