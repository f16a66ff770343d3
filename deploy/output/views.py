"""Each command's result as people read it."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from deploy.doctor.finding import Finding
from deploy.output.table import duration, percent, table, told, told_size
from deploy.planning.memory import size
from deploy.verify.store_path import StorePath
from deploy.workflows.doctor import Examination

if TYPE_CHECKING:
    from deploy.metrics.lmcache_server import LmcacheServerUse
    from deploy.workflows.catalog_images import ImageRow
    from deploy.workflows.down import DownResult
    from deploy.workflows.fix_states import Fixes
    from deploy.workflows.running import RunningStack
    from deploy.workflows.saved_state import HistoryEntry
    from deploy.workflows.status import StackStatus
    from deploy.workflows.swap import SwapResult
    from deploy.workflows.up import UpResult

_EVENTS_SHOWN = 10
_WIDTH = 7  # of the longest status, 'unknown'
_SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|KEY(?!_?FILE)", re.IGNORECASE)
_LOG_IN = re.compile(r"(?<=//)[^/\s]*@")


def _path_table(paths: Sequence[tuple[str, StorePath]]) -> str:
    rows = [
        (
            name,
            f"{path.stored_bytes / 1e9:.2f}",
            f"{path.loaded_bytes / 1e9:.2f}",
            f"{path.load_gb_s:.2f}" if path.loaded_s else "-",
            f"{path.lookup_ms:.1f}" if path.lookups else "-",
            f"{path.refused:.0f}",
            f"{path.left_out + path.not_loaded:.0f}",
            f"{path.failures:.0f}",
            f"{path.late:.0f}",
        )
        for name, path in paths
    ]
    header = ("Redis path", "GB in", "GB out", "GB/s out", "lookup ms", "refused", "lost",
              "failures", "late")  # fmt: skip
    return table(header, rows)


def up_view(result: UpResult, total_s: float) -> str:
    """Describe the start: how long it took, and the stack's URL."""
    plan = result.running.prepared.plan
    url = result.running.stack.url
    lines = [_served(result.running)]
    if result.slowest_engine_s:
        lines.append(
            f"slowest engine's own start: {result.slowest_engine_s:.1f} s; "
            f"deploy up in total: {total_s:.1f} s"
        )
    lines += [f"warning: {warning}" for warning in result.warnings]
    body = f'{{"model": "{plan.model.served_name}", "prompt": "Hello", "max_tokens": 16}}'
    which = "" if plan.name == "pdkit" else f" --name {plan.name}"
    file = result.running.prepared.spec.api_key_file
    key = f'-H "Authorization: Bearer $(cat {file})" ' if file else ""
    if not url:
        return "\n".join((*lines, "", f"look at it   deploy status{which}"))
    lines += [
        "",
        f"talk to it   curl {url}/v1/completions -H 'Content-Type: application/json' {key}\\",
        f"               -d '{body}'",
        f"look at it   deploy status{which}",
        f"check again  deploy check{which}",
        f"stop it      deploy down{which}",
    ]
    return "\n".join(lines)


def _served(running: RunningStack) -> str:
    """Return in one line what serves where, or what another host's router can use."""
    plan, stack = running.prepared.plan, running.stack
    if stack.url:
        return (
            f"The stack '{plan.name}' ({plan.topology}) serves {plan.model.served_name} at "
            f"{stack.url}"
        )
    everywhere = ipaddress.ip_address(plan.spec.engine.bind).is_unspecified
    engines = ", ".join(
        f"{{role: {one.role}, url: 'http://HOST:{one.port}'}}"
        if everywhere
        else f"{{role: {one.role}, url: '{one.url}'}}"
        for one in plan.engines
    )
    which = "; HOST is an address of this host" if everywhere else ""
    return (
        f"This host's part of the stack '{plan.name}' ({plan.topology}) runs. On the router's "
        f"host: router.engines: [{engines}]{which}"
    )


def status_view(status: StackStatus) -> str:
    """Return a stack's services as a table, with the hit rate since the engines started."""
    if not status.up:
        others = f"; running: {', '.join(status.others)}" if status.others else ""
        return f"the stack '{status.name}' is not up{others}"
    rows = [
        (
            service.name if service.log else f"{service.name} ({service.url})",
            service.condition + (f", drained by {service.drained_by}" if service.drained else ""),
            service.pid or "-",
            duration(service.uptime_s) if service.uptime_s else "-",
            size(service.resident_mib) if service.resident_mib else "-",
            service.restarts,
            percent(service.cache.external_hits / service.cache.external_queries)
            if service.cache and service.cache.external_queries
            else "-",
        )
        for service in status.services
    ]
    header = ("service", "state", "pid", "up", "memory", "restarts", "external hits")
    lines = [
        f"stack '{status.name}': {status.topology}, {status.model}, "
        f"{status.url or 'router on another host'}",
        f"on {status.vendor}, runtime {status.runtime}"
        + (f", image {status.image}" if status.image else ""),
        "",
        table(header, rows),
    ]
    if status.store or status.user_redis:
        lines += ["", _store_line(status)]
    if status.kv_server:
        lines += ["", *_prompts_line(status), _server_line(status.kv_server)]
    if paths := [(service.name, service.path) for service in status.services if service.path]:
        lines += ["", _path_table(paths)]
    lines += [f"warning: {line}" for line in status.warnings]
    if status.events:
        lines += ["", "events, the newest last:"]
        for event in status.events[-_EVENTS_SHOWN:]:
            at = datetime.fromisoformat(event.at).isoformat(timespec="seconds")
            lines.append(f"{at}  {event.service} {event.text}")
    if len(status.history) > 1:
        lines += ["", "history, newest first:", _history(status.history)]
    return "\n".join(lines)


def _store_line(status: StackStatus) -> str:
    whose = "your own Redis" if status.user_redis else "Redis"
    store = status.store
    if store is None:
        return f"{whose}: does not answer"
    return f"{whose}: {told(store.keys)} keys, {store.memory}, {told(store.evicted_keys)} evicted"


def _prompts_line(status: StackStatus) -> list[str]:
    """Describe the prompts of all engines since their start; no line without any."""
    caches = [service.cache for service in status.services if service.cache]
    asked = sum(cache.prompt_tokens for cache in caches)
    if not asked:
        return []
    held = sum(cache.local_hits for cache in caches)
    loaded = sum(cache.external_hits for cache in caches)
    shares = [percent(tokens / asked) for tokens in (held, loaded, max(0, asked - held - loaded))]
    return [
        f"prompts of all engines: {asked:,} tokens; {shares[0]} from their own caches, "
        f"{shares[1]} loaded, {shares[2]} computed"
    ]


def _server_line(use: LmcacheServerUse) -> str:
    memory = f"LMCache's server: {told_size(use.used_bytes)} of {told_size(use.max_bytes)}"
    if not use.asked_tokens:
        return f"{memory}; no tokens were requested yet"
    here, redis = (
        percent(tokens / use.asked_tokens) for tokens in (use.found_tokens, use.redis_tokens)
    )
    return (
        f"{memory}; engines requested {use.asked_tokens:,} tokens: {here} were in its memory, "
        f"{redis} came from Redis"
    )


def down_view(result: DownResult) -> str:
    """Return whether a stack is down, and which keys it left in the user's own Redis."""
    lines = [f"the stack '{result.name}' {'is down' if result.was_up else 'was not up'}"]
    if result.others and not result.was_up:
        lines[0] += f"; running: {', '.join(result.others)}"
    left = result.left
    if left and left.removed:
        lines.append(f"removed from your Redis: {left.keys} keys {left.prefix}*")
    elif left and left.why_not:
        lines.append(f"keys {left.prefix}* may remain in your Redis: {left.why_not}")
    elif left and left.keys:
        many = f"{left.keys}" if left.all_seen else f"at least {left.keys}"
        lines += [
            f"{many} keys {left.prefix}* stay in your Redis for the next start of this stack",
            f"remove them: deploy down --volumes --name {result.name}, with -f STACK_FILE where "
            "redis.url_file is not in ./deploy.yaml",
        ]
    return "\n".join(lines)


def swap_view(result: SwapResult) -> str:
    """Describe the result of a swap or rollback."""
    before, after = result.labels
    if result.check is None:
        return f"the stack '{result.name}' already runs on {after}; nothing was changed"
    which = "" if result.name == "pdkit" else f" --name {result.name}"
    return "\n".join(
        (
            f"The stack '{result.name}' runs on {after} (before: {before})",
            f"{result.down_s:.1f} s without service; kept running: "
            f"{', '.join(result.kept) or 'nothing'}",
            "",
            f"go back to it   deploy rollback{which}",
        )
    )


def images_view(rows: Sequence[ImageRow]) -> str:
    """Return the catalogue as a table."""
    cells = [
        (
            row.name + (" *" if row.default else ""),
            row.image,
            row.vllm or "-",
            row.lmcache or "-",
            row.verdict or "-",
            f"{row.age_days} d",
            size(row.size_mib) if row.here else f"no: {row.how}",
        )
        for row in rows
    ]
    header = ("image", "reference", "vLLM", "LMCache", "together", "pinned", "here")
    notes = [f"{row.name}: {row.note}" for row in rows if row.note]
    return "\n".join((table(header, cells), "", "* the vendor's default", *notes))


def fixes_view(found: Fixes) -> str:
    """Return the fixes as a table, with warnings about them."""
    rows = [
        (
            row.id,
            "; ".join(
                f"{state} ({', '.join(engines)})" if len(row.states) > 1 else state
                for state, engines in row.states.items()
            ),
            row.title,
            row.link.removeprefix("https://github.com/"),
        )
        for row in found.fixes
    ]
    lmcache = f", LMCache {found.lmcache}" if found.lmcache else ""
    if found.not_for:
        return f"{found.where}: {found.not_for}"
    return "\n".join(
        (
            f"{found.where}{lmcache}",
            "",
            table(("fix", "state", "bug", "upstream"), rows),
            *(f"warning: {line}" for line in found.warnings),
        )
    )


def _history(entries: Sequence[HistoryEntry]) -> str:
    rows = [
        (
            datetime.fromisoformat(one.at).isoformat(timespec="seconds"),
            one.action,
            one.outcome,
            one.ran_on,
            one.image or "-",
            one.topology,
            shorten(one.reason, 60, placeholder=" …"),
        )
        for one in entries
    ]
    return table(("when", "by", "went", "vendor", "image", "topology", "why not"), rows)


def doctor_view(found: Examination) -> str:
    """Show the findings by area, with reason and fix where one is not ok, and a verdict."""
    shape = f" ({found.topology})" if found.topology else ""
    lines = [f"stack '{found.name}'{shape} on {found.vendor}, runtime {found.runtime}", ""]
    width = max((len(one.id) for one in found.findings), default=0)
    for one in found.findings:
        lines += _finding(one, width)
    return "\n".join((*lines, "", _verdict(found)))


def _finding(one: Finding, width: int) -> Iterator[str]:
    yield f"{one.status.ljust(_WIDTH)}  {one.id.ljust(width)}  {one.message}"
    margin = " " * (_WIDTH + 2 + width + 2)
    if one.why:
        yield f"{margin}why: {one.why}"
    if one.fix:
        yield f"{margin}try: {one.fix}"


def _verdict(found: Examination) -> str:
    counts = Counter(one.status for one in found.findings)
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    end = "`deploy up` would fail" if found.failed else "nothing blocks `deploy up`"
    return f"{said}: {end}"


def settings_view(spec: object, names: Sequence[str]) -> str:
    """Return the settings of these names as lines, without secrets: 'engine.python  ./python'."""
    settings = [setting for name in names for setting in _settings(name, spec)]
    width = max(len(name) for name, _ in settings)
    return "".join(f"  {name:{width}}  {value}\n" for name, value in settings)


def _settings(name: str, found: Any) -> Iterator[tuple[str, str]]:
    """Yield a setting, or each variable of engine.env, and its value as it can be shown."""
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, dict) and found:
        for key, value in found.items():
            yield _printable(f"{name}.{key}"), "***" if _SECRET.search(key) else _shown(value)
    else:
        yield name, _shown(found)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return shlex.join(_shown(one) for one in value)
    return _printable(_LOG_IN.sub("***@", str(value)))


def _printable(text: str) -> str:
    """Return a text that cannot move the cursor or turn the direction of what is read."""
    return text if text.isprintable() else repr(text)
