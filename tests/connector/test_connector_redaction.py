"""No password reaches a log, a print or a traceback."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest
from pdkit_connector import redaction
from pdkit_connector.fixes import b15_redact_secrets as b15
from pdkit_connector.redaction import (
    Redactor,
    install,
    known_secrets,
    record_factory,
    redact_stream,
    secrets_in,
)
from pdkit_connector.registry import FixState, Setting, apply_fix

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"redis://:{SECRET}@127.0.0.1:6379/0",
        f"rediss://user:{SECRET}@redis:6379",
        f"redis-sentinel://user:{SECRET}@a:1,b:2",
        f"redis://:p@{SECRET}@host:1",
        f"unix:///run/redis.sock?db=0&password={SECRET}",
        f"{{'remote_url': 'redis://:{SECRET}@h:1', 'chunk_size': 256}}",
        f"['redis://:{SECRET}@a:1', 'redis://:{SECRET}@b:1']",
        f"{{'extra_config': {{'redis_password': '{SECRET}'}}}}",
        f'{{"password": "{SECRET}"}}',
        f"{{'DB_PASS': '{SECRET}', 'x': 1}}",
        f"{{'PRIVATE_KEY': '{SECRET}'}}",
        f"PASSPHRASE='{SECRET}'",
        f"OPENAI_KEY = '{SECRET}'",
        f"{{'HF_TOKEN': '{SECRET}'}}",
        f"HTTPS_PROXY=http://me:{SECRET}@proxy:3128",
    ],
)
def test_secrets_are_masked_by_shape(text):
    clean = Redactor()(text)
    assert SECRET not in clean
    assert "***" in clean


@pytest.mark.parametrize(
    "text",
    [
        "redis://127.0.0.1:6379/0",
        "key model@1@0@abc@bfloat16 stored at redis://h:1/0",
        "http://host/path?q=a@b",
        "a password is required: see the manual",
        "{'max_tokens': '16', 'pass': '2', 'key': 'a'}",
    ],
)
def test_text_without_secrets_stays(text):
    assert Redactor(["unrelated"])(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        " ",
        "password",
        "password=",
        "password='",
        "passwd: ",
        "_pass",
        "a.",
        "x://",
        "a@",
        "://",
    ],
)
def test_a_long_text_takes_time_in_proportion(piece, monkeypatch):
    """Whatever a client chooses: vLLM logs the name of an unknown model."""
    monkeypatch.setattr(redaction, "_LONGEST", 1 << 21)  # not by what is cut off

    def seconds(length):
        text = f"http:// {piece * (length // len(piece))}"
        began = time.thread_time()
        Redactor()(text)
        return time.thread_time() - began

    short, long = min(seconds(1 << 16) for _ in range(3)), seconds(1 << 20)
    # 16 times the text; 256 times the seconds were it quadratic.
    assert long < 64 * max(short, 0.001)


def test_long_texts_are_cut_to_what_a_log_can_use():
    shown = Redactor()("a" * (1 << 22))
    assert len(shown) < 1 << 17
    assert shown.endswith("... (a text of 4194304 characters)")
    assert Redactor()("b" * (1 << 18) + "\n").endswith(")\n"), "a line stays a line"


@pytest.mark.parametrize("back", range(0, 80, 3))
def test_cutting_a_text_never_leaves_half_a_secret(back, monkeypatch):
    monkeypatch.setattr(redaction, "_LONGEST", 1000)
    monkeypatch.setattr(redaction, "_BEYOND", 60)
    text = f"{'a ' * 500} redis://:{SECRET}@host "
    for known in ([], [SECRET]):
        assert SECRET[:4] not in Redactor(known)(text[back:] + "b " * 500)


def test_known_secrets_are_masked_by_value_raw_and_quoted():
    redact = Redactor(["a%2Fbcdefgh"])
    assert redact("got a%2Fbcdefgh and a/bcdefgh") == "got *** and ***"
    assert Redactor(["short"])("short words stay") == "short words stay"


def test_known_secrets_come_from_lmcaches_environment_and_file(tmp_path):
    config = tmp_path / "lmcache.yaml"
    config.write_text(f"chunk_size: 256\nremote_url: redis://:{SECRET}@h:1\n")
    environ = {
        "LMCACHE_CONFIG_FILE": str(config),
        "LMCACHE_REMOTE_URL": "redis://u:from-the-env@h:1",
        "LMCACHE_RESP_PASSWORD": "plain-word",
        "OTHER_URL": "redis://:not-ours@h:1",
    }
    assert known_secrets(environ) == {SECRET, "from-the-env", "plain-word"}
    assert known_secrets({"LMCACHE_CONFIG_FILE": str(tmp_path / "absent")}) == frozenset()
    assert secrets_in("redis://h:1 and redis://:@h") == frozenset()


@pytest.mark.parametrize(
    "text",
    [
        f"unix:///run/redis.sock?db=0&password={SECRET}",
        f"extra_config:\n  redis_password: {SECRET}\n",
        f'{{"password": "{SECRET}"}}',
        f"redis://:{SECRET}@h:1",
    ],
)
def test_secrets_are_found_in_urls_and_settings(text):
    assert secrets_in(text) == {SECRET}


@pytest.fixture
def capture():
    """Return (logger, stream); restore the record factory after."""
    factory = logging.getLogRecordFactory()
    stream = io.StringIO()
    logger = logging.Logger("lmcache.test")
    logger.addHandler(logging.StreamHandler(stream))
    yield logger, stream
    logging.setLogRecordFactory(factory)


def log_and_fail(logger: logging.Logger) -> None:
    logger.info("Creating connector for URL: %s", f"redis://:{SECRET}@h:1")
    logger.info("config %s", {"remote_url": f"redis://:{SECRET}@h:1"})
    logger.info("number %d of %s", 3, "x")
    try:
        raise ValueError(f"No adapter for redis://:{SECRET}@h:1")
    except ValueError:
        logger.exception("failed")


def test_records_and_tracebacks_come_out_redacted(capture):
    logger, stream = capture
    logging.setLogRecordFactory(record_factory(logging.getLogRecordFactory(), Redactor()))
    log_and_fail(logger)
    assert SECRET not in stream.getvalue()
    assert "redis://***@h:1" in stream.getvalue()
    assert "number 3 of x" in stream.getvalue()
    assert "Traceback" in stream.getvalue()


def test_the_secret_is_logged_without_the_fix(capture):
    logger, stream = capture
    log_and_fail(logger)
    assert stream.getvalue().count(SECRET) == 3


def test_prints_are_redacted():
    stream = io.StringIO()
    redact_stream(stream, Redactor())
    print("at", f"redis://:{SECRET}@h:1", file=stream)
    assert stream.getvalue() == "at redis://***@h:1\n"


def test_the_fix_is_needed_here_and_works(capture, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    outcome = apply_fix(b15.FIX, Setting())
    assert outcome.state is FixState.APPLIED
    for place in ("configuration dump", "redis_adapter.py", "remote_backend.py"):
        assert place in outcome.evidence
    assert apply_fix(b15.FIX, Setting()).state is FixState.NOT_NEEDED


def test_the_probe_detects_a_fix_that_did_not_work(capture, monkeypatch):
    monkeypatch.setattr(b15, "install", lambda _redactor: None)
    assert apply_fix(b15.FIX, Setting()).state is FixState.FAILED


def test_the_scan_finds_only_urls_that_are_logged():
    source = (
        'logger.info("at %s", context.url)\nlogger.info(f"{remote_url}")\nlogger.info("ok %s", n)\n'
    )
    assert b15.url_log_lines(source) == [1, 2]


def test_install_covers_loggers_and_streams(capture, monkeypatch):
    logger, stream = capture
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    install(Redactor([SECRET]))
    logger.info("word %s", SECRET)
    print(SECRET)
    assert SECRET not in stream.getvalue() + out.getvalue()
