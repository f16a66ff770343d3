"""A check's result as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.output.table import percent, table, told
from deploy.verify.canaries import CanaryFindings, ago
from deploy.verify.hits import Hits, Tiers, added, is_pinned, pinned_range
from deploy.verify.items import ROUTER
from deploy.verify.report import CheckReport, Equivalence, StoreUse
from deploy.verify.store_path import StorePath


def check_view(report: CheckReport) -> str:
    """Return the check as one table, a verdict, and causes where it failed."""
    lines = [
        *_reuse(report),
        _answers_line(report.equivalence),
        _noise_line(report.equivalence),
        *([canaries_line(report.canaries)] if report.canaries else []),
        *_asides(report),
        *([_store_line(report.store)] if report.store else []),
        *([_path_line(report.path)] if report.path else []),
        "",
        f"check {'passed' if report.passed else 'FAILED'} in {report.seconds:.1f} s",
        *(f"  failed: {failure}" for failure in report.failures),
    ]
    for cause in report.diagnosis:
        word = "note" if report.passed else "cause"
        lines += [f"  {word}: {cause.message} [{cause.code}]", f"    try: {cause.hint}"]
    return "\n".join(lines)


def _reuse(report: CheckReport) -> list[str]:
    """Describe how much KV was reused."""
    if report.store is None and not report.left_out:
        return [
            f"{len(report.engines)} engines share no KV, so there is nothing to reuse; "
            "the router reaches each, and their answers are compared",
            "",
        ]
    rows = [_hits_row(pair.name, pair.hits) for pair in report.pairs]
    total = report.total
    if len(rows) > 1:
        rows.append(_hits_row("all pairs", total))
    rows.append(_hits_row(ROUTER, report.race.hits))
    for name, phase in report.phases.items():
        if not phase.skipped:
            rows.append(_hits_row(name, phase.hits))
    tiers = added(pair.tiers for pair in report.pairs)
    header = ("prefill → decode", "queries", "hits", "eligible", "hit rate", "eligible hit rate")
    return [
        table(header, rows),
        "",
        f"External prefix cache hit rate: {percent(total.rate)} (hits / queries of the pairs)",
        f"Eligible hit rate: {percent(total.eligible_rate)} (hits / tokens that can hit)",
        *([_tiers_line(tiers)] if tiers else []),
    ]


def _tiers_line(tiers: Tiers) -> str:
    parts = {
        "their own caches": tiers.local,
        "LMCache's server": tiers.server,
        "Redis": tiers.redis,
    }
    loaded = ", ".join(f"{count} from {name}" for name, count in parts.items() if count)
    return (
        f"The pairs' prompts: {tiers.asked} tokens; consumers had {loaded or 'none'} and computed "
        f"{tiers.computed}"
    )


def _answers_line(same: Equivalence) -> str:
    return (
        f"Answers: {same.compared} compared with recomputed ones, {same.mismatched} mismatches, "
        f"largest log-probability difference {same.max_logprob_diff:.4f}"
    )


def _store_line(store: StoreUse) -> str:
    return (
        f"Redis: {told(store.keys_before)} → {told(store.keys_after)} keys, "
        f"{store.memory} used, {told(store.evicted_keys)} evicted; "
        f"{told(store.keys_removed)} keys of the check removed"
    )


def runs_view(reports: Sequence[CheckReport]) -> str:
    """Return the outcome of a repeated check."""
    passed = sum(report.passed for report in reports)
    slowest = max(report.seconds for report in reports)
    said = f"{passed} of {len(reports)} runs passed; the slowest took {slowest:.1f} s"
    failed = [str(number) for number, report in enumerate(reports, 1) if not report.passed]
    return said + (f"; failed: {', '.join(failed)}" if failed else "")


def _hits_row(name: str, hits: Hits) -> tuple[object, ...]:
    return (
        name, hits.queries, hits.hits, hits.eligible, percent(hits.rate),
        percent(hits.eligible_rate),
    )  # fmt: skip


def _noise_line(same: Equivalence) -> str:
    measured = (
        "not measured, since no engine answered from its own prefix cache"
        if same.noise_floor is None
        else f"an engine differs from itself by {same.noise_floor:.4f} (root mean square)"
    )
    return f"Noise: {measured}; differences up to {same.tolerance:.2f} are tolerated"


def canaries_line(found: CanaryFindings) -> str:
    """Return in one line what became of the prompts that earlier checks left."""
    counts = {
        "evicted": found.count("evicted"),
        "with KV of another identity": found.count("other"),
    }
    rest = "".join(f"; {count} of {found.known} {what}" for what, count in counts.items() if count)
    there = len({look.tag for look in found.compared})
    wrong = len({look.tag for look in found.looks if look.wrong})
    if found.oldest_s is None:
        return f"Canaries: no KV of an earlier check{rest}"
    answers = f"{wrong} answered otherwise" if wrong else "same answers"
    oldest = (
        f", the oldest of {ago(found.oldest_s)}" if there > 1 else f", of {ago(found.oldest_s)}"
    )
    return f"Canaries: {there}{oldest}: {answers}{rest}"


def _asides(report: CheckReport) -> Iterator[str]:
    """Yield lines on parts that were left out, and on numbers that are uncertain."""
    yield from (f"Left out: {one}" for one in report.left_out)
    if report.burst and not report.burst.skipped:
        yield f"Burst: {report.burst.requests} requests, {report.burst.failed} failed"
    for name, phase in report.phases.items():
        if phase.skipped:
            yield f"Left out: {name}, because {phase.skipped}"
    hits = {ROUTER: report.race, **report.phases}
    blurred = [name for name, phase in hits.items() if phase.blurred]
    if blurred:
        yield f"Not judged, because others sent requests: the hits of {', '.join(blurred)}"
    if report.vllm and not is_pinned(report.vllm):
        yield (
            f"vLLM {report.vllm} may count differently: the rule for eligible tokens was tested "
            f"with {pinned_range()}"
        )
    if report.store and report.store.keys_removed is None:
        yield (
            "The check's keys stay in Redis until they are evicted: they could not be listed; "
            "allow its user SCAN and UNLINK"
        )
    for prompt in report.prompts:
        yield (
            f"Your prompt, {prompt.name}: {prompt.tokens} tokens, {prompt.chunks} whole chunks of "
            f"{prompt.chunk_size}, {prompt.eligible} tokens eligible; {prompt.loaded} from the "
            f"store, {prompt.local} from the consumer's own cache; the producer already had "
            f"{prompt.producer_local + prompt.producer_loaded}"
        )
    if report.others:
        yield (
            f"Others: {report.others} requests were served meanwhile; the pairs' hits are the "
            "check's own, Redis's numbers include all requests"
        )


def _path_line(path: StorePath) -> str:
    """Describe the traffic to and from Redis, with its failures."""
    wrong = {
        "refused": path.refused,
        "not loaded": path.not_loaded,
        "not stored": path.left_out,
        "failures": path.failures,
        "answers sent before their KV": path.late,
    }
    trouble = ", ".join(f"{count:.0f} {what}" for what, count in wrong.items() if count)
    return (
        f"Redis path: stored {path.stored_bytes / 1e6:.1f} MB, "
        f"loaded {path.loaded_bytes / 1e6:.1f} MB at {path.load_gb_s:.2f} GB/s, "
        f"looked up in {path.lookup_ms:.1f} ms; {trouble or 'nothing refused, late or lost'}"
    )
