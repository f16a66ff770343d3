"""The part of a vLLM engine that LMCache's adapter sees, around the real adapter of a release.

KV is told by what it depends on: the KV of a token is the tuple of all tokens up to it, and of what
else the request's KV depends on. So wrong KV is seen where it is attended to, stored or loaded.
Requests and scheduler outputs are vLLM's own; LMCache's engine is a store of chunks by their
tokens, which is what its keys are. Stand-ins: `Tensor.cuda` gives the tensor itself (old adapters
move slot mappings to a GPU), and there is one pipeline stage.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lmcache.integration.vllm import vllm_v1_adapter as adapter
from pdkit_connector.in_engine.adapter_miniature import (
    BLOCK,
    CHUNK,
    IdleEngine,
    LookupClient,
    miniature,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus


class ChunkStore(IdleEngine, LookupClient):
    """LMCache's engine and its lookup client: chunks of KV by the tokens up to their end."""

    def __init__(self, slots: dict[int, Any]) -> None:
        IdleEngine.__init__(self)
        LookupClient.__init__(self)
        self.chunks: dict[tuple[int, ...], list[Any]] = {}
        self.slots = slots
        self.unpinned: list[str] = []
        self.lost = False

    def lookup(self, tokens: Any, lookup_id: str, **_more: Any) -> int:
        self.asked.append(lookup_id)
        end = 0
        while end < len(tokens) and tuple(tokens[: end + CHUNK]) in self.chunks:
            end += CHUNK
        return end

    def store(self, tokens: Any, mask: Any, slot_mapping: Any, **_more: Any) -> None:
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            where = slot_mapping[end - CHUNK : end].tolist()
            if mask[end - 1] and tuple(tokens[:end]) not in self.chunks:
                self.chunks[tuple(tokens[:end])] = [self.slots.get(slot) for slot in where]

    def retrieve(self, tokens: Any, mask: Any, slot_mapping: Any, **_more: Any) -> torch.Tensor:
        found = torch.zeros(len(tokens), dtype=torch.bool)
        for end in range(CHUNK, len(tokens) + 1, CHUNK):
            chunk = None if self.lost else self.chunks.get(tuple(tokens[:end]))
            if mask[end - 1] and chunk is not None:
                found[end - CHUNK : end] = True
                where = slot_mapping[end - CHUNK : end].tolist()
                self.slots.update(zip(where, chunk, strict=True))
        return found

    def lookup_unpin(self, req_id: str) -> None:
        self.unpinned.append(req_id)


class Vllm:
    """Scheduler and worker.

    `ahead` schedules a step before it knows the last one's tokens, as asynchronous scheduling does;
    `resumed_as_new` hands a request that resumes over as a new one, as for vLLM's second runner.
    """

    def __init__(self, *, ahead: bool = False, resumed_as_new: bool = False, **own: Any) -> None:
        torch.Tensor.cuda = lambda self, *_args, **_more: self  # type: ignore[method-assign]
        adapter.get_pp_group = lambda: SimpleNamespace(is_last_rank=True)
        self.slots: dict[int, Any] = {}
        self.store = ChunkStore(self.slots)
        self.scheduler = miniature(client=self.store, **own)
        self.worker = miniature(engine=self.store, **own)
        self.ahead = ahead
        self.resumed_as_new = resumed_as_new
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, list[int]] = {}
        self.free = 1
        self.pending: list[tuple[Request, int]] = []
        self.failed: set[int] = set()
        self.meta: Any = None
        self.attn_metadata: Any = object()
        self._kv: dict[str, list[Any]] = {}

    def add(
        self, req_id: str, prompt: list[int], *, params: SamplingParams | None = None, **more: Any
    ) -> Request:
        """Add a request, not scheduled yet."""
        params = params or SamplingParams(max_tokens=1000)
        self.requests[req_id] = Request(req_id, list(prompt), params, None, **more)
        return self.requests[req_id]

    def preempt(self, req_id: str) -> None:
        """Take a request's blocks, and give them to others."""
        request = self.requests[req_id]
        for block in self.blocks.pop(req_id):
            self.slots.update((block * BLOCK + i, "another request's") for i in range(BLOCK))
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1
        self._receive()

    def step(self, tokens: dict[str, int], *, external: bool = True) -> Any:
        """Schedule so many tokens a request at most, load, compute and save; return the metadata.

        Without `external`, vLLM takes none of what the adapter offers.
        """
        new, resumed, cached, count = [], [], [], {}
        grown: dict[str, Any] = {}
        for req_id, most in tokens.items():
            request = self.requests[req_id]
            if request.status != RequestStatus.RUNNING:
                self._admit(request, external)
                (new if request.status == RequestStatus.WAITING else resumed).append(request)
            else:
                cached.append(request)
            here = request.num_computed_tokens
            count[req_id] = min(most, self._length(request) - here)
            before = self.blocks.setdefault(req_id, [])
            more = self._allocate(before, here + count[req_id])
            grown[req_id] = (more,) if more else None
            request.status = RequestStatus.RUNNING
        self._run(self._output(new, resumed, cached, count, grown), count)
        return self.meta

    def _admit(self, request: Request, external: bool) -> None:
        offered = self.scheduler.get_num_new_matched_tokens(request, 0) or 0
        taken = offered if external else 0
        self.blocks[request.request_id] = []
        self._allocate(self.blocks[request.request_id], taken)
        self.scheduler.update_state_after_alloc(request, taken)
        request.num_computed_tokens = taken

    def _allocate(self, blocks: list[int], tokens: int) -> list[int]:
        more = max(0, -(-tokens // BLOCK) - len(blocks))
        added = list(range(self.free, self.free + more))
        self.free += more
        blocks.extend(added)
        return added

    def _output(self, new: Any, resumed: Any, cached: Any, count: Any, grown: Any) -> Any:
        output = SchedulerOutput.make_empty()
        if self.resumed_as_new:
            new, resumed = [*new, *resumed], []
        output.scheduled_new_reqs = [
            NewRequestData.from_request(
                r,
                (list(self.blocks[r.request_id]),),
                r._all_token_ids if self.resumed_as_new else None,
            )
            for r in new
        ]
        ids = [r.request_id for r in (*cached, *resumed)]
        data = CachedRequestData.make_empty()
        data.req_ids = ids
        data.resumed_req_ids = {r.request_id for r in resumed}
        data.new_block_ids = [
            (list(self.blocks[i]),) if i in data.resumed_req_ids else grown[i] for i in ids
        ]
        data.num_computed_tokens = [self.requests[i].num_computed_tokens for i in ids]
        output.scheduled_cached_reqs = data
        output.num_scheduled_tokens = count
        return output

    def _run(self, output: Any, count: dict[str, int]) -> None:
        self.meta = self.scheduler.build_connector_meta(output)
        known = list(self.pending)
        self.load(self.meta)
        for req_id, scheduled in count.items():
            self._compute(self.requests[req_id], scheduled)
        self.worker.wait_for_save()
        self.failed = self.worker.get_block_ids_with_load_errors()
        for request in self.requests.values():
            self._set_back(request)
        self._receive(known if self.ahead else None)

    def load(self, meta: Any) -> None:
        """Bind the metadata of a step and load."""
        self.worker._parent = SimpleNamespace(
            _connector_metadata=meta, _get_connector_metadata=lambda: meta
        )
        self.worker.start_load_kv(SimpleNamespace(attn_metadata=self.attn_metadata))

    def _compute(self, request: Request, scheduled: int) -> None:
        """Attend to all KV before, write that of the new tokens, and sample after the last."""
        begin = request.num_computed_tokens
        for position in range(begin, begin + scheduled):
            kv = self.kv(request, position) if self.stands(request, position) else "wrong"
            self.slots[self.slot(request, position)] = kv
        request.num_computed_tokens += scheduled
        if request.num_computed_tokens == self._length(request):
            self.pending.append((request, self.token(request, request.num_computed_tokens)))

    def _length(self, request: Request) -> int:
        """Return how many tokens a request has, those included that only the worker knows."""
        return request.num_tokens + sum(waiting is request for waiting, _ in self.pending)

    def _receive(self, known: list[tuple[Request, int]] | None = None) -> None:
        """Tell the scheduler the sampled tokens, all or those of earlier steps."""
        for request, token in self.pending if known is None else known:
            request.append_output_token_ids(token)
        self.pending = [] if known is None else self.pending[len(known) :]

    def _set_back(self, request: Request) -> None:
        """Compute a request again from the first of its blocks that failed to load."""
        for index, block in enumerate(self.blocks.get(request.request_id, ())):
            if block in self.failed:
                request.num_computed_tokens = index * BLOCK
                self.pending = [told for told in self.pending if told[0] is not request]
                return

    def slot(self, request: Request, position: int) -> int:
        """Return where the KV of a position belongs."""
        return self.blocks[request.request_id][position // BLOCK] * BLOCK + position % BLOCK

    def token(self, request: Request, position: int) -> int:
        """Return the token at a position: of the prompt, or else what the model says."""
        prompt = request.prompt_token_ids
        return prompt[position] if position < len(prompt) else 1000 + position

    def kv(self, request: Request, position: int) -> Any:
        """Return the KV of a position."""
        known = self._kv.setdefault(request.request_id, [])
        while len(known) <= position:
            before = known[-1][2] if known else ()
            tokens = (*before, self._content(request, len(known)))
            known.append((request.lora_request, request.cache_salt, tokens))
        return known[position]

    def _content(self, request: Request, position: int) -> Any:
        """Return the image that a position is of, or else the token at it."""
        for feature in request.mm_features:
            if 0 <= position - feature.mm_position.offset < feature.mm_position.length:
                return feature.identifier
        return self.token(request, position)

    def stands(self, request: Request, end: int) -> bool:
        """Tell whether all KV before a position is the request's own."""
        return all(self.slots.get(self.slot(request, i)) == self.kv(request, i) for i in range(end))

    def check_attended(self, request: Request) -> None:
        """Raise AssertionError where a request stands on KV that is not its own."""
        assert self.stands(request, request.num_computed_tokens), "attended to wrong KV"

    def check_stored(self) -> None:
        """Raise AssertionError where a chunk is not the KV of its tokens, whoever asks for it."""
        for tokens, chunk in self.store.chunks.items():
            begin = len(tokens) - CHUNK
            expected = [(None, None, tokens[: begin + i + 1]) for i in range(CHUNK)]
            assert chunk == expected, f"wrong KV under tokens up to {len(tokens)}"
