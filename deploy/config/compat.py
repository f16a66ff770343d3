"""Which vLLM versions work with which LMCache versions, read from images/compat.yaml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from deploy.assets import yaml_asset
from deploy.config.catalog import EngineImage, load_catalog
from deploy.errors import ConfigError

Judgement = Literal["proven", "derived", "known_bad", "unknown"]


@dataclass(frozen=True)
class PairRule:
    """One entry of the table; it applies if all its `options` are on."""

    id: str
    verdict: Judgement
    vendors: tuple[str, ...]
    vllm: str
    lmcache: str
    why: str
    link: str
    options: tuple[str, ...] = ()

    def fits(self, vendor: str, vllm: str, lmcache: str, on: Collection[str]) -> bool:
        """Return whether the entry applies to this pair with these options on."""
        return (
            vendor in self.vendors
            and all(option in on for option in self.options)
            and in_range(self.vllm, vllm)
            and in_range(self.lmcache, lmcache)
        )


@dataclass(frozen=True)
class PairVerdict:
    """What is known of a pair on a vendor.

    Attributes:
        rule: id of the entry that decided; '' if none applies.
        pair: the versions, for messages.
        good: the vendor's default image, whose pair works.
    """

    verdict: Judgement
    pair: str
    reason: str
    good: EngineImage
    link: str = ""
    rule: str = ""


def judge(
    vendor: str,
    vllm: str | None,
    lmcache: str | None,
    *,
    layerwise: bool = False,
    save_decode_cache: bool = False,
) -> PairVerdict:
    """Return what is known about a pair of versions; without a version, the pair is unknown."""
    options = {"layerwise": layerwise, "save_decode_cache": save_decode_cache}
    on = {name for name, set_ in options.items() if set_}
    fitting: list[PairRule] = []
    if vllm is not None and lmcache is not None:
        fitting = [rule for rule in load_rules() if rule.fits(vendor, vllm, lmcache, on)]
    rule = min(fitting, key=lambda rule: rule.verdict != "known_bad", default=None)
    return PairVerdict(
        verdict=rule.verdict if rule else "unknown",
        pair=f"vLLM {vllm or '(unknown)'} with LMCache {lmcache or '(unknown)'} on {vendor}",
        reason=rule.why if rule else _why_unknown(vllm, lmcache),
        good=load_catalog().default_for(vendor),
        link=rule.link if rule else "",
        rule=rule.id if rule else "",
    )


def require_compatible(verdict: PairVerdict, *, allow_unproven: bool) -> str:
    """Refuse a broken or unknown pair unless the user allows it; return a warning, or ''.

    Raises:
        ConfigError: naming the pair, the upstream report where there is one, and a good pair.
    """
    if verdict.verdict in ("proven", "derived"):
        return ""
    bad = verdict.verdict == "known_bad"
    message = f"{verdict.pair} {'is broken' if bad else 'is untested'}: {verdict.reason}"
    if verdict.link:
        message += f" ({verdict.link})"
    if allow_unproven:
        return message
    good = verdict.good
    raise ConfigError(
        f"{message}. A tested pair is {good.pair} (profile '{good.name}')",
        hint=f"--image {good.name}; to run it anyway, add --allow-unproven",
    )


def in_range(spec: str, version: str) -> bool:
    """Return whether a version is in a PEP 440 range; other versions match only by `===`.

    An empty range contains every version, even one that does not follow PEP 440.
    """
    if spec.startswith("==="):
        return version == spec[3:]
    if spec == f"=={version}":  # the common case, without the time to import packaging
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(spec).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return not spec


@lru_cache(maxsize=1)
def load_rules() -> tuple[PairRule, ...]:
    """Read the table that ships with pdkit."""
    return parse_rules(yaml_asset("images", "compat.yaml")["pairs"])


def parse_rules(rows: Iterable[Mapping[str, Any]]) -> tuple[PairRule, ...]:
    """Return the entries of a table; an unknown key is a TypeError, a bug of pdkit."""
    return tuple(_rule(**row) for row in rows)


def _rule(*, vendors: Iterable[str], options: Iterable[str] = (), **rest: Any) -> PairRule:
    return PairRule(vendors=tuple(vendors), options=tuple(options), **rest)


def _why_unknown(vllm: str | None, lmcache: str | None) -> str:
    if vllm is None or lmcache is None:
        return "the versions in the image are not known"
    return "it is not in pdkit's compatibility table"
