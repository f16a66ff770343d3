"""Rules on the user's own Redis."""

from __future__ import annotations

from deploy.doctor.finding import Rule, Verdict, ok, tried, unknown, warn
from deploy.doctor.observed import RedisSeen, Seen
from deploy.planning.memory import GIB

_MIN_MAJOR = 5
_SMALL_BYTES = GIB


def _policy(seen: Seen) -> Verdict | None:
    if not seen.redis:
        return None
    if any(one.policy is None or one.max_memory_bytes is None for one in seen.redis):
        return unknown("your Redis does not let this user see maxmemory-policy (INFO)")
    first = seen.redis[0]
    if any(one.max_memory_bytes == 0 for one in seen.redis):
        return warn(
            "your Redis has no maxmemory",
            "it grows until its machine runs out of memory and kills it",
            "CONFIG SET maxmemory 8gb, and maxmemory in its redis.conf",
        )
    keeping = [one.policy for one in seen.redis if one.memory.keeps_kv]
    if keeping:
        return warn(
            f"maxmemory-policy of your Redis is {keeping[0]}",
            "KV has no expiry, so nothing is evicted: a full Redis takes no new KV, and hits stop",
            "CONFIG SET maxmemory-policy allkeys-lru",
        )
    return ok(f"maxmemory-policy {first.policy}")


def _size(seen: Seen) -> Verdict | None:
    limits = [one.max_memory_bytes for one in seen.redis]
    known = [limit for limit in limits if limit]
    if not known or len(known) < len(limits) or seen.plan is None:
        return None
    total, a_token = sum(known), seen.plan.kv_bytes_per_token
    prompt = (seen.plan.max_model_len or 0) * (a_token or 0)
    says = f"{total / GIB:.1f} GiB" + (f", about {total // a_token:,} tokens" if a_token else "")
    if total < max(_SMALL_BYTES, prompt):
        return warn(
            f"your Redis holds {says}",
            "KV is evicted before it is reused",
            f"CONFIG SET maxmemory {max(2, 1 + 2 * prompt // GIB)}gb",
        )
    return ok(f"your Redis holds {says}")


def _persistence(seen: Seen) -> Verdict | None:
    if not seen.redis:
        return None
    if any(one.append_only is None for one in seen.redis):
        return unknown("your Redis does not let this user see whether it writes to disk (INFO)")
    writing = _writing(seen.redis)
    if writing:
        return warn(
            f"your Redis writes to disk ({writing})",
            "all KV is also written to disk, and the fork of a snapshot may double the memory",
            'CONFIG SET appendonly no, CONFIG SET save ""',
        )
    if any(one.snapshots is None for one in seen.redis):
        return ok("no append-only file; this user may not see whether it takes snapshots")
    return ok("nothing is written to disk")


def _writing(servers: tuple[RedisSeen, ...]) -> str:
    ways = []
    if any(one.append_only for one in servers):
        ways.append("appendonly yes")
    ways += [f'save "{one.snapshots}"' for one in servers if one.snapshots][:1]
    return ", ".join(ways)


def _version(seen: Seen) -> Verdict | None:
    versions = [one.version for one in seen.redis if one.version]
    if not versions:
        return None
    old = [one for one in versions if int(one.partition(".")[0]) < _MIN_MAJOR]
    if old:
        return warn(
            f"your Redis is version {old[0]}",
            "pdkit is untested with versions this old",
            f"upgrade to Redis {_MIN_MAJOR} or newer",
        )
    return ok(f"Redis {', '.join(sorted(set(versions)))}")


def _break_even(seen: Seen) -> Verdict | None:
    if seen.measured is None:
        return None
    if not seen.measured.pays:
        return warn(
            str(seen.measured),
            "Redis and LMCache cost more than they save with this model on this machine",
            "deploy bench sweep --gpus N, or --engines N on CPUs, finds the best topology",
        )
    return ok(str(seen.measured))


RULES = (
    Rule(
        "redis.break_even", _break_even,
        looks_at="what the last `deploy bench` of this model on this machine measured",
        warns="loading KV was slower than computing it for every prompt length",
        fix="`deploy bench sweep --gpus N`",
    ),
    Rule(
        "redis.answers",
        tried("redis", "KV cannot be stored"),
        looks_at="whether your own Redis answers and accepts its user; your other secret files",
        fails="it does not, or a secret file cannot be read (exit code 2)",
        fix="follow Redis's message",
    ),
    Rule(
        "redis.policy", _policy,
        looks_at="`maxmemory` and `maxmemory-policy` of your own Redis",
        warns="no limit, or a policy that never evicts KV",
        fix="`CONFIG SET maxmemory-policy allkeys-lru`",
    ),
    Rule(
        "redis.size", _size,
        looks_at="its `maxmemory` against the plan",
        warns="less than 1 GiB, or less than the longest prompt", fix="`CONFIG SET maxmemory …`",
    ),
    Rule(
        "redis.persistence", _persistence,
        looks_at="whether it writes KV to disk",
        warns="it does", fix='`CONFIG SET appendonly no`, `CONFIG SET save ""`',
    ),
    Rule(
        "redis.version", _version,
        looks_at="its version", warns="it is older than 5", fix="upgrade Redis",
    ),
)  # fmt: skip
