"""LMCache's adapter with its fixes, in steps of a vLLM engine, and what the fixes stand on."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lmcache.integration.vllm import utils, vllm_v1_adapter
from lmcache.integration.vllm.vllm_v1_adapter import (
    LMCacheConnectorMetadata,
    LMCacheConnectorV1Impl,
    LoadSpec,
    ReqMeta,
    RequestTracker,
    SaveSpec,
)
from pdkit_connector.connector import start_failure
from pdkit_connector.fixes import b11_slot_mapping, b16b_image_keys
from pdkit_connector.in_engine.adapter_miniature import (
    BLOCK,
    CHUNK,
    IdleEngine,
    LookupClient,
    miniature,
)
from pdkit_connector.in_engine.step_requests import of_step, resumed_ids, without
from pdkit_connector.registry import FixState, Need, Setting, apply_fix, discover
from pdkit_connector.request_view import RequestView, viewed
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from adapter_steps import Vllm

OURS = ("B4a", "B4b", "B4d", "B4e", "B11", "B12", "B16", "B16b", "B19", "B25")
FIXES = {fix.id: fix for fix in discover() if fix.id in OURS}
METHODS = (
    "start_load_kv", "save_kv_layer", "wait_for_save", "record_failed_blocks",
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "request_finished",
)  # fmt: skip


@pytest.fixture(autouse=True)
def untouched(restored, monkeypatch):
    """Put back whatever a fix or the trial's engine replaces."""
    restored(LMCacheConnectorV1Impl, *METHODS)
    restored(vllm_v1_adapter, "get_pp_group", "apply_mm_hashes_to_token_ids")
    restored(utils, "apply_mm_hashes_to_token_ids")
    restored(torch.Tensor, "cuda")
    made = RequestTracker.__dict__["from_new_request"]
    monkeypatch.setattr(RequestTracker, "from_new_request", made)


@pytest.fixture
def fixed():
    """Apply all of the adapter's fixes; those that a release does not need change nothing."""
    states = {fix.id: apply_fix(fix, Setting()).state for fix in FIXES.values()}
    assert set(states.values()) <= {FixState.APPLIED, FixState.NOT_NEEDED, FixState.NOT_APPLICABLE}
    return states


def test_every_fix_is_found():
    assert set(FIXES) == set(OURS)


@pytest.mark.parametrize("fix_id", OURS)
def test_a_probe_has_the_same_answer_twice_and_after_the_fix_another(fix_id):
    fix = FIXES[fix_id]
    before = fix.probe(Setting())
    assert fix.probe(Setting()) == before
    if before.need is Need.NEEDED:
        assert apply_fix(fix, Setting()).state is FixState.APPLIED
        assert fix.probe(Setting()).need is Need.NOT_NEEDED


def test_no_probe_writes_to_the_log(fixed, capfd):
    capfd.readouterr()
    for fix in FIXES.values():
        fix.probe(Setting())
    assert capfd.readouterr() == ("", "")


def drive(seed: int, **kind) -> Vllm:
    """Let requests come, share prefixes, be preempted, lose their loads and grow, at random."""
    rng = random.Random(seed)
    ahead = kind.get("ahead", False)
    vllm = Vllm(save_decode_cache=rng.random() < 0.7, **kind)
    for number in range(40):
        if number % 3 == 0:
            begin, length = rng.choice((0, 100)), rng.randrange(5, 40)
            more = {"cache_salt": "tenant"} if rng.random() < 0.2 else {}
            if number % 5 == 0:
                more["params"] = SamplingParams(max_tokens=1000, prompt_logprobs=1)
            vllm.add(f"r{number}", list(range(begin, begin + length)), **more)
        running = [i for i, r in vllm.requests.items() if r.status == RequestStatus.RUNNING]
        if running and rng.random() < 0.25:
            vllm.preempt(rng.choice(running))
        vllm.store.lost = not ahead and rng.random() < 0.2
        chosen = rng.sample(sorted(vllm.requests), min(3, len(vllm.requests)))
        vllm.step({i: rng.choice((1, 3, 7, 100)) for i in chosen}, external=rng.random() < 0.8)
        for request in vllm.requests.values():
            if request.status == RequestStatus.RUNNING:
                vllm.check_attended(request)
    vllm.check_stored()
    return vllm


KINDS = [
    {},
    {"ahead": True},
    {"resumed_as_new": True},
    {"ahead": True, "resumed_as_new": True},
    {"kv_role": "kv_producer"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_request_uses_wrong_kv_and_none_is_stored(fixed, kind):
    stored = sum(len(drive(seed, **kind).store.chunks) for seed in range(10))
    assert stored > 40


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_steps_find_the_bugs_of_the_untouched_adapter(kind):
    failed = 0
    for seed in range(10):
        try:
            drive(seed, **kind)
        except AssertionError:
            failed += 1
    assert failed > 2


def meta(req_id="a", tokens=2 * CHUNK, slots=2 * CHUNK, load=None):
    return ReqMeta(
        req_id=req_id,
        token_ids=list(range(tokens)),
        slot_mapping=torch.arange(BLOCK, BLOCK + slots),
        save_spec=SaveSpec(0, True),
        load_spec=load,
    )


def worker_with(*requests, **own):
    metadata = LMCacheConnectorMetadata(requests=list(requests))
    parent = SimpleNamespace(_connector_metadata=metadata, _get_connector_metadata=lambda: metadata)
    return miniature(engine=IdleEngine(), _parent=parent, **own)


@pytest.mark.parametrize(
    ("load", "slots", "blocks"),
    [
        (LoadSpec(0, CHUNK, True), 2 * CHUNK - 1, {1, 2}),
        (LoadSpec(BLOCK, CHUNK, True), 2 * CHUNK - 1, {2}),
        (LoadSpec(CHUNK, 2 * CHUNK, True), CHUNK, {2}),
        (LoadSpec(0, CHUNK, False), CHUNK, set()),
        (None, CHUNK, set()),
    ],
)
def test_blocks_of_a_desynced_load_are_reported(fixed, load, slots, blocks):
    worker = worker_with(meta(slots=slots, load=load))
    worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
    assert worker.get_block_ids_with_load_errors() == blocks


def test_a_load_that_no_block_can_be_named_for_is_an_error():
    worker = worker_with(meta(slots=0, load=LoadSpec(0, CHUNK, True)))
    with pytest.raises(RuntimeError, match="has no slots"):
        b11_slot_mapping._report(worker, of_step(worker)[0])


def test_a_producer_does_not_store_a_desynced_request_either(fixed):
    worker = worker_with(meta(slots=3), kv_role="kv_producer")
    worker.lmcache_engine.store = pytest.fail
    worker.wait_for_save()
    assert [request.req_id for request in of_step(worker)] == ["a"], "the metadata is as it was"


def test_requests_removed_from_a_step_return_after_an_error():
    worker = worker_with(meta("a"), meta("b"))
    with pytest.raises(OSError, match="x"), without(worker, lambda r: r.req_id == "a") as taken:
        assert [request.req_id for request in taken] == ["a"]
        assert [request.req_id for request in of_step(worker)] == ["b"]
        raise OSError("x")
    assert [request.req_id for request in of_step(worker)] == ["a", "b"]


def test_a_step_without_metadata_has_no_requests():
    worker = miniature(_parent=SimpleNamespace(_connector_metadata=None))
    assert of_step(worker) == []
    with without(worker, lambda _request: True) as taken:
        assert taken == []


def test_a_view_shows_its_own_state_and_restores_the_request():
    request = SimpleNamespace(num_computed_tokens=9, other=1)
    requests = {"a": request}
    view = RequestView(request, num_computed_tokens=5)
    with pytest.raises(KeyError), viewed(requests, {"a": view}):
        assert requests["a"].num_computed_tokens == 5
        assert requests["a"].other == 1
        raise KeyError
    assert requests == {"a": request}
    with viewed(requests, {"a": view}):
        del requests["a"]
    assert requests == {}


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ([SimpleNamespace(req_id="a", resumed_from_preemption=True)], set()),
        (SimpleNamespace(req_ids=["a", "b"], resumed_from_preemption=[False, True]), {"b"}),
        (SimpleNamespace(req_ids=["a", "b"], resumed_req_ids={"a"}), {"a"}),
    ],
)
def test_the_resumed_requests_are_read_from_every_vllm_version(cached, expected):
    assert resumed_ids(SimpleNamespace(scheduled_cached_reqs=cached)) == expected


def test_decoding_with_drafts_stores_the_tokens_that_were_accepted(fixed):
    vllm = Vllm(save_decode_cache=True)
    request = vllm.add("a", list(range(CHUNK)))
    vllm.step({"a": CHUNK})
    output = vllm._output([], [], [request], {"a": 4}, {"a": None})
    vllm.scheduler.build_connector_meta(output)
    tracked = vllm.scheduler._request_trackers["a"].token_ids
    assert tracked == list(request.all_token_ids)
    request.append_output_token_ids([1, 2, 3])
    request.num_computed_tokens += 3
    vllm.scheduler.build_connector_meta(output)
    assert vllm.scheduler._request_trackers["a"].token_ids == list(request.all_token_ids)


def test_a_request_of_another_engine_is_logged_once_and_never_looked_up(fixed, capfd):
    client = LookupClient(CHUNK)
    scheduler = miniature(client=client)
    for req_id in ("a", "b"):
        vllm = SimpleNamespace(request_id=req_id, cache_salt="tenant", lora_request=None)
        assert scheduler.get_num_new_matched_tokens(vllm, 0) == 0
    assert client.asked == []
    assert scheduler.load_specs["a"].can_load is False


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_cancels_the_lookup_once(fixed, asynchronous):
    client = LookupClient()
    cancelled: list[str] = []
    client.cancel_lookup = cancelled.append
    scheduler = miniature(client=client, async_loading=asynchronous)
    for status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED):
        scheduler.request_finished(SimpleNamespace(request_id="a", status=status), [])
    assert cancelled == (["a"] if asynchronous else [])


def filled(length: int, identifier: str, *, offset: int = 2, span: int = 9) -> list[int]:
    place = SimpleNamespace(offset=offset, length=span)
    tokens = torch.zeros(length, dtype=torch.long)
    return b16b_image_keys._fill(tokens, [identifier], [place]).tolist()


def test_placeholders_of_a_shorter_prompt_begin_those_of_a_longer_one():
    whole = filled(16, "image")
    assert whole[:2] == [0, 0]
    assert whole[11:] == [0] * 5
    assert len(set(whole[2:11])) == 9
    for length in range(16):
        assert filled(length, "image") == whole[:length]
    assert not set(filled(16, "another")[2:11]) & set(whole[2:11])
    assert max(whole) < 2**31


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (SimpleNamespace(_manager=SimpleNamespace(_init_failed=False)), None),
        (SimpleNamespace(_manager=SimpleNamespace()), None),
        (SimpleNamespace(), None),
        (SimpleNamespace(lmcache_engine=object()), None),
        (SimpleNamespace(lmcache_engine=None, lookup_client=object()), None),
        (SimpleNamespace(lmcache_engine=None, lookup_client=None), "neither an engine"),
        (
            SimpleNamespace(
                _manager=SimpleNamespace(_init_failed=True, _init_failed_reason="a\nOSError: x\n")
            ),
            "OSError: x",
        ),
        (
            SimpleNamespace(_manager=SimpleNamespace(_init_failed=True, _init_failed_reason="")),
            "no reason",
        ),
        (SimpleNamespace(_manager=SimpleNamespace(_init_failed=True)), "no reason"),
    ],
)
def test_a_failed_start_is_seen_on_every_release(adapter, reason):
    found = start_failure(adapter)
    assert (found is None) if reason is None else (reason in found)
