"""Which vLLM versions work with which LMCache versions, read from images/compat.yaml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from deploy.assets import yaml_asset
from deploy.config.catalog import EngineImage, load_catalog
from deploy.config.fields import IN_ENGINES, MP, Connector
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError

Judgement = Literal["tested", "derived", "known_bad", "unknown"]
_GOOD = ("tested", "derived")
# Settings that an entry of the table may name.
OPTIONS = ("layerwise", "save_decode_cache")


@dataclass(frozen=True)
class PairRule:
    """One entry of the table; it applies to its `connectors`, if all its `options` are on."""

    id: str
    verdict: Judgement
    vendors: tuple[str, ...]
    vllm: str
    lmcache: str
    why: str
    link: str
    options: tuple[str, ...] = ()
    connectors: tuple[str, ...] = (IN_ENGINES, MP)

    def fits(
        self, vendor: str, vllm: str, lmcache: str, connector: str, on: Collection[str]
    ) -> bool:
        """Return whether the entry applies to this pair with these options on."""
        return (
            vendor in self.vendors
            and connector in self.connectors
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
        good: an image of the vendor whose pair works; None without one.
        other: another connector, with which this pair works; '' if none does.
    """

    verdict: Judgement
    pair: str
    reason: str
    good: EngineImage | None
    link: str = ""
    rule: str = ""
    other: str = ""

    @property
    def works(self) -> bool:
        """Whether it runs without --allow-untested."""
        return self.verdict in _GOOD


def judge(
    vendor: str,
    vllm: str | None,
    lmcache: str | None,
    *,
    connector: str = IN_ENGINES,
    on: Collection[str] = (),
    rules: Iterable[PairRule] | None = None,
) -> PairVerdict:
    """Look up a pair of versions; without a version, the pair is unknown.

    Args:
        on: the options that are on, of `OPTIONS`.
        rules: the table; the one that ships with pdkit if None.
    """
    rule = _rule_for(vendor, vllm, lmcache, connector, on, rules)
    how = " through LMCache's server" if connector == MP else ""
    others = (one for one in (IN_ENGINES, MP) if one != connector)
    return PairVerdict(
        verdict=rule.verdict if rule else "unknown",
        pair=f"vLLM {vllm or '(unknown)'} with LMCache {lmcache or '(unknown)'} on {vendor}{how}",
        reason=rule.why if rule else _why_unknown(vllm, lmcache),
        good=_working_image(vendor, connector),
        link=rule.link if rule else "",
        rule=rule.id if rule else "",
        other=next((one for one in others if _works(vendor, vllm, lmcache, one)), ""),
    )


def options_on(settings: object) -> frozenset[str]:
    """Return those `OPTIONS` that a spec or plan has on."""
    return frozenset(name for name in OPTIONS if getattr(settings, name))


def _rule_for(
    vendor: str,
    vllm: str | None,
    lmcache: str | None,
    connector: str,
    on: Collection[str] = (),
    rules: Iterable[PairRule] | None = None,
) -> PairRule | None:
    if vllm is None or lmcache is None:
        return None
    known = load_rules() if rules is None else rules
    fitting = (rule for rule in known if rule.fits(vendor, vllm, lmcache, connector, on))
    return min(fitting, key=lambda rule: rule.verdict != "known_bad", default=None)


def default_connector(vendor: str, vllm: str | None, lmcache: str | None) -> Connector:
    """Return the default connector for a pair of versions.

    LMCache inside the engines, unless only LMCache's server works with the pair.
    """
    fitting = (one for one in (IN_ENGINES, MP) if _works(vendor, vllm, lmcache, one))
    return next(fitting, IN_ENGINES)


def connector_of(spec: StackSpec, vendor: str, vllm: str | None, lmcache: str | None) -> Connector:
    """Return a spec's connector; with --allow-untested, LMCache's server must be named."""
    default = IN_ENGINES if spec.allow_untested else default_connector(vendor, vllm, lmcache)
    return spec.connector or default


def image_for(vendor: str, connector: str) -> EngineImage:
    """Return a vendor's image for a connector: its default, unless only another's pair works."""
    return _working_image(vendor, connector) or load_catalog().default_for(vendor)


def _working_image(vendor: str, connector: str) -> EngineImage | None:
    catalog = load_catalog()
    for image in (catalog.default_for(vendor), *catalog.engines.values()):
        if image.vendor == vendor and _works(vendor, image.vllm, image.lmcache, connector):
            return image
    return None


def _works(vendor: str, vllm: str | None, lmcache: str | None, connector: str) -> bool:
    rule = _rule_for(vendor, vllm, lmcache, connector)
    return rule is not None and rule.verdict in _GOOD


def require_compatible(verdict: PairVerdict, *, allow_untested: bool) -> str:
    """Refuse a broken or unknown pair unless the user allows it; return a warning, or ''.

    Raises:
        ConfigError: naming the pair, the upstream report where there is one, and a good pair.
    """
    if verdict.works:
        return ""
    bad = verdict.verdict == "known_bad"
    message = f"{verdict.pair} {'is broken' if bad else 'is untested'}: {verdict.reason}"
    if verdict.link:
        message += f" ({verdict.link})"
    if allow_untested:
        return message
    ways = [f"--connector {verdict.other}"] if verdict.other else []
    if good := verdict.good:
        message += f". A tested pair is {good.pair} (profile '{good.name}')"
        ways.append(f"--image {good.name}")
    anyway = "to run it anyway, add --allow-untested"
    raise ConfigError(message, hint="; ".join(filter(None, (", or ".join(ways), anyway))))


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


def _rule(**row: Any) -> PairRule:
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return PairRule(**{**row, **lists})


def _why_unknown(vllm: str | None, lmcache: str | None) -> str:
    if vllm is None or lmcache is None:
        return "the versions in the image are not known"
    return "it is not in pdkit's compatibility table"
