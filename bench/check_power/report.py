"""What trials add up to, for people, programs and docs/results."""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.check_power.damage import KINDS, NOTHING
from bench.check_power.layout import WORDS
from bench.check_power.trials import HEALTHY, Outcome
from bench.redis_path.page import machine
from deploy.tiny_model.shape import VERSION
from deploy.verify.equivalence import LOGPROB_TOLERANCE

NEEDED = 0.99  # of the trials of a kind
_CHUNK, _BLOCK = 256, 32  # tokens, as the stack of the trials has them

_PAGE = """# How reliably the check notices wrong KV

`python -m bench.check_power --trials {trials} --healthy {healthy} --seed {seed} --results FILE`
wrote this page on {date}.

{machine}

The stack is what `deploy up` makes of `vendor: cpu` and the tiny model (recipe version {version}),
in bfloat16 and with `redis: {{client: lmcache}}`: LMCache's own client, which has no checksum, so
only the answers can show damage. Each trial runs the check's own code on one pair (two prompts, and
the first one cut short), and damages one thing in Redis after the first prompt's prefill and before
its decode. How much engines' own answers differ is measured once, before all trials; whole checks
measure it themselves. The seed determines what is damaged and where; the check's prompts are
random. A trial counts as noticed if the check finds anything wrong. The difference is the largest
of log-probabilities in the trial; the check tolerates {tolerance}, or more where engines have more
noise. It is infinite if two answers have no likely token in common. If the damage makes logits NaN,
vLLM answers the request with HTTP 400, which the check counts as a failure. `nothing` is a trial in
which the damaging process runs but changes nothing; `healthy` are whole checks. Both come before
the first damage; then the kinds of damage take turns.

{table}

Two tokens that are exchanged in both K and V change no answer to a prompt that contains both: a key
carries its position, and attention adds up the same numbers. Within one block ({block} tokens; one
such pair of {blocks}) no request that vLLM can serve from its cache contains one without the other,
so this does no harm. In different blocks, only a cut between them shows the exchange: the check
cuts each chunk at its quarters, which separates three of four pairs. So no rate is required of this
kind.

Trials without damage come first, because NaN stays in an engine's KV memory after its request and
spoils later answers ([seen](../reference/diagnosis.md#kv_differs)).
"""
_SHAPED = """
## bfloat16 noise of a real shape

The tiny model is made to have little noise. So here is the same with a random model in the shape of
Qwen2.5-0.5B, `--layers {layers}` of its 24 (hidden size 896, 151,936 tokens, the likeliest logits
around 20, bfloat16). No rate is required of it, because its weights are not trained.

{table}
"""
TIERS = {
    "memory": """
## KV in the memory of LMCache's server, {dtype}

The same with `connector: lmcache-mp`: `python -m bench.check_power --tier memory --dtype {dtype}`
damages the chunks in the memory of LMCache's server, which has no checksum either.

{table}
""",
    "redis": """
## KV in Redis behind LMCache's server, {dtype}

`--tier redis --dtype {dtype}` damages the chunks in Redis, where each has a checksum, and has the
server drop its own copy. A damaged chunk must be refused: the check reports missing hits, and each
answer is right, since what is refused is computed again (no difference above {tolerance}).

{table}
""",
}


@dataclass(frozen=True)
class Row:
    """The trials of one kind.

    Attributes:
        noticed: of `trials`, those in which the check found something wrong.
        differences: the largest differences of log-probabilities, in order.
    """

    kind: str
    trials: int
    noticed: int
    differences: Sequence[float]
    seconds: float
    tier: str = ""

    @property
    def sound(self) -> bool:
        """Whether nothing was damaged, so that the check must find nothing."""
        return self.kind in (HEALTHY, NOTHING)

    @property
    def holds(self) -> bool:
        """Whether it is as it must be; nothing is asked of a kind that cannot be noticed."""
        if self.sound:
            return self.noticed == 0
        if not self.expected:
            return True
        harmless = self.tier != "redis" or self.differences[-1] <= LOGPROB_TOLERANCE
        return harmless and self.noticed >= NEEDED * self.trials

    @property
    def expected(self) -> bool:
        """Whether the check must notice it; a checksum knows all kinds."""
        return not self.sound and (self.tier == "redis" or KINDS[self.kind].expected)

    @property
    def tells(self) -> str:
        if self.kind == HEALTHY:
            return "nothing is damaged; the whole check"
        return KINDS[self.kind].tells

    def as_dict(self) -> dict[str, Any]:
        finite = [None if math.isinf(value) else round(value, 4) for value in self.differences]
        return {**asdict(self), "differences": finite, "holds": self.holds}


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each kind that was tried on one tier, in the order of the kinds."""
    found = []
    for kind in (*KINDS, HEALTHY):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        if of_kind:
            found.append(
                Row(
                    kind,
                    len(of_kind),
                    sum(outcome.noticed for outcome in of_kind),
                    sorted(outcome.max_logprob_diff for outcome in of_kind),
                    statistics.median(outcome.seconds for outcome in of_kind),
                    of_kind[0].tier,
                )
            )
    return found


def table(found: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| kind | what | noticed | must | difference: lowest | median | highest | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        low, middle, high = (
            _number(value)
            for value in (
                row.differences[0],
                row.differences[len(row.differences) // 2],
                row.differences[-1],
            )
        )
        lines.append(
            f"| {row.kind} | {row.tells} | {row.noticed} of {row.trials} | {_must(row)} "
            f"| {low} | {middle} | {high} | {row.seconds:.1f} |"
        )
    return "\n".join(lines)


def page(outcomes: Sequence[Outcome], seed: int) -> str:
    """Return the page of results, as Markdown."""
    plain = [one for one in outcomes if not one.tier and one.dtype == "bfloat16"]
    layers = max((one.layers for one in plain), default=0)
    shaped = rows([one for one in plain if one.layers and one.layers == layers])
    found = rows([one for one in plain if not one.layers])
    by_kind = {row.kind: row for row in found}
    healthy = by_kind.get(HEALTHY)
    sections = [
        _PAGE.format(
            trials=max((row.trials for row in found if row.kind != HEALTHY), default=0),
            healthy=healthy.trials if healthy else 0,
            seed=seed,
            version=VERSION,
            date=datetime.datetime.now(tz=datetime.timezone.utc).date(),
            machine=machine("as installed"),
            tolerance=LOGPROB_TOLERANCE,
            table=table(found),
            block=_BLOCK,
            blocks=_CHUNK // _BLOCK,
        )
    ]
    if shaped:
        sections.append(_SHAPED.format(layers=layers, table=table(shaped)))
    for tier, dtype in itertools.product(TIERS, WORDS):
        if found := rows([one for one in outcomes if (one.tier, one.dtype) == (tier, dtype)]):
            text, tolerance = TIERS[tier], LOGPROB_TOLERANCE
            sections.append(text.format(dtype=dtype, table=table(found), tolerance=tolerance))
    return "".join(sections)


def _must(row: Row) -> str:
    if row.sound:
        wanted = "0"
    elif row.expected:
        wanted = f"≥ {100 * NEEDED:.0f} %"
    else:
        return "-"
    return wanted if row.holds else f"{wanted}: **missed**"


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3f}"


OLD_CHECKS = "whole checks"
_OLDER_HEADING = "## KV older than the model\n"
_OLDER = """{heading}

`python -m bench.check_power.older --store STORE --trials {trials} --record RECORD`, once for each
way to store KV, measured this; with `--results FILE` it writes this section. {date}.

{machine}

Every prompt above is new, and says nothing of KV that an older computation left.
[Canaries](../explanation/check.md#kv-of-earlier-checks) do. Here the check's own code leaves them,
the engines are started again with other weights and, against the kit's refusal, with the same keys,
and the check's own code looks at each. A trial counts as noticed if stored KV answers otherwise
than a fresh computation. "x % noise" multiplies each weight with 1 + x % of a normal number, like a
small fine-tune; no rate is required of it. "{checks}" are `deploy check --quick` with canaries of
before a restart, one restart before every ten of them; their differences are those of canaries that
were loaded.

{table}
"""


def older_table(found: Sequence[Any]) -> str:
    """Return canaries after each change of weights as a Markdown table."""
    lines = [
        "| KV by | weights | noticed | difference: lowest | median | highest | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ranked = row.differences or [0.0]
        low, middle, high = map(_number, (ranked[0], ranked[len(ranked) // 2], ranked[-1]))
        missed = "" if row.holds else ": **missed**"
        lines.append(
            f"| {row.stored}, {row.dtype} | {row.change} | {row.noticed} of {row.looked}{missed} "
            f"| {low} | {middle} | {high} | {row.seconds:.1f} |"
        )
    return "\n".join(lines)


def with_older(page: str, found: Sequence[Any]) -> str:
    """Return a page of results with its section on KV older than the model replaced, or added."""
    before, heading, after = page.partition(_OLDER_HEADING)
    _, next_heading, rest = after.partition("\n## ") if heading else ("", "", "")
    section = _OLDER.format(
        heading=_OLDER_HEADING.rstrip(),
        trials=max((row.looked for row in found if row.change != OLD_CHECKS), default=0),
        date=datetime.datetime.now(tz=datetime.timezone.utc).date(),
        # Rows may be of earlier runs, whose load was another.
        machine=machine("as installed").partition(" Load averages")[0],
        checks=OLD_CHECKS,
        table=older_table(found),
    )
    return f"{before.rstrip()}\n\n{section}{next_heading}{rest}"
