"""The compatibility table: what is known of a pair, and what is refused."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from deploy.config.catalog import load_catalog
from deploy.config.compat import (
    OPTIONS,
    PairRule,
    default_connector,
    image_for,
    in_range,
    judge,
    load_rules,
    parse_rules,
    require_compatible,
)
from deploy.config.fields import IN_ENGINES, MP
from deploy.config.vendors import VENDORS
from deploy.errors import ConfigError

RULES = load_rules()
# With a pair that only an option breaks; the table has no such entry at present.
WITH_OPTION = (
    *RULES,
    PairRule(
        "with-an-option", "known_bad", ("cuda", "rocm"), "", "<0.4.4",
        "single layers are lost", "https://github.com/LMCache/LMCache", ("layerwise",),
    ),
)  # fmt: skip


class TestTheTable:
    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
    def test_every_entry_is_complete(self, rule) -> None:  # type: ignore[no-untyped-def]
        assert rule.verdict in ("tested", "derived", "known_bad")
        assert rule.link.startswith("https://github.com/")
        assert rule.vendors and set(rule.vendors) <= set(VENDORS)
        assert set(rule.options) <= set(OPTIONS)
        assert rule.connectors and set(rule.connectors) <= {IN_ENGINES, MP}
        assert rule.why and not rule.why.endswith(".")

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
    def test_only_exact_pairs_count_as_working(self, rule) -> None:  # type: ignore[no-untyped-def]
        if rule.verdict != "known_bad":
            assert rule.vllm.startswith("==")
            assert rule.lmcache.startswith("==")

    def test_ids_are_used_once(self) -> None:
        assert len({rule.id for rule in RULES}) == len(RULES)

    def test_a_key_it_does_not_know_is_refused(self) -> None:
        with pytest.raises(TypeError, match="lmcashe"):
            parse_rules([{"id": "x", "vendors": [], "lmcashe": "1"}])


@pytest.mark.parametrize(
    ("vendor", "vllm", "lmcache", "verdict", "rule"),
    [
        ("cuda", "0.25.1", "0.5.3", "tested", "cuda"),
        ("rocm", "0.25.1", "0.5.3", "derived", "torch-2.11"),
        ("cuda", "0.25.1+cu130", "0.5.3", "tested", "cuda"),
        ("rocm", "0.25.1+rocm723", "0.5.3+rocm7.2", "derived", "torch-2.11"),
        ("cpu", "0.32.0", "0.5.6", "tested", "cpu"),
        ("rocm", "nightly_main_20260112", "0.3.13.dev0+gc1e3cd52", "derived", "seed"),
        # B6 begins with vLLM 0.26 and holds for every LMCache that is out.
        ("cuda", "0.26.0", "0.5.3", "known_bad", "B6"),
        ("cuda", "0.26.0", "0.5.6", "known_bad", "B6"),
        ("rocm", "0.26.0", "0.5.6", "known_bad", "B6"),
        ("rocm", "0.26.0", "0.5.6+rocm7.2", "known_bad", "B6"),
        ("cuda", "0.26.0rc1.dev123+gabc1234", "0.5.3", "known_bad", "B6"),
        ("cuda", "0.32.0", "0.5.6", "known_bad", "B6"),
        ("cuda", "0.26.0", "0.5.6.dev4", "known_bad", "B6"),
        ("cuda", "0.26.0", "0.5.7", "unknown", ""),
        ("cuda", "0.26.0", "0.5.7rc2", "unknown", ""),
        ("cuda", "0.25.2", "0.5.3", "unknown", ""),
        ("cuda", "0.25.1.dev7+gabc1234", "0.5.3", "unknown", ""),
        # torch 2.13 beside 2.11; LMCache's wheels for ROCm stayed with 2.11.
        ("cuda", "0.25.1", "0.5.4", "known_bad", "torch-abi"),
        ("cuda", "0.25.1", "0.5.6", "known_bad", "torch-abi"),
        ("cuda", "0.20.0", "0.5.6", "known_bad", "torch-abi"),
        ("cuda", "0.25.1", "0.5.7", "unknown", ""),
        ("rocm", "0.25.1", "0.5.6", "unknown", ""),
        # Each vendor has its own pair.
        ("cpu", "0.25.1", "0.5.3", "unknown", ""),
        ("cpu", "0.32.0", "0.5.5", "unknown", ""),
        ("cpu", "0.33.0", "0.5.6", "unknown", ""),
        ("cuda", "nightly_main_20260112", "0.3.13.dev0+gc1e3cd52", "unknown", ""),
        ("rocm", "nightly_main_20260113", "0.3.13.dev0+gc1e3cd52", "unknown", ""),
        # Wrong KV after preemptions, for which there is no fix any more.
        ("cuda", "0.11.0", "0.3.9.post2", "known_bad", "old-lmcache"),
        # Development builds, and what is no version at all.
        ("cuda", "0.14.0rc1.dev123+gabc1234", "0.3.12", "unknown", ""),
        ("cuda", "dev", "0.5.3", "unknown", ""),
        ("cuda", "0.25.1", "", "unknown", ""),
        ("cuda", None, "0.5.3", "unknown", ""),
        ("cuda", "0.25.1", None, "unknown", ""),
        ("cuda", None, None, "unknown", ""),
    ],
)
def test_pairs_are_judged_by_the_table(
    vendor: str, vllm: str | None, lmcache: str | None, verdict: str, rule: str
) -> None:
    found = judge(vendor, vllm, lmcache)
    assert (found.verdict, found.rule) == (verdict, rule)


@pytest.mark.parametrize(
    ("vendor", "vllm", "lmcache", "verdict", "rule", "default"),
    [
        ("cpu", "0.32.0", "0.5.6", "tested", "cpu", "lmcache"),
        ("cuda", "0.25.1", "0.5.3", "unknown", "", "lmcache"),
        ("cuda", "0.32.0", "0.5.6", "tested", "mp-torch-2.13", "lmcache-mp"),
        ("cuda", "0.32.0+cu130", "0.5.6", "tested", "mp-torch-2.13", "lmcache-mp"),
        ("cuda", "0.31.0", "0.5.6", "unknown", "", "lmcache"),
        # torch 2.14 lacks what LMCache's wheel needs.
        ("cuda", "0.33.0", "0.5.6", "known_bad", "torch-2.14-abi", "lmcache"),
        ("cuda", "0.25.1", "0.5.6", "known_bad", "torch-abi", "lmcache"),
        ("rocm", "0.25.1", "0.5.3", "known_bad", "rocm-events", "lmcache"),
        ("rocm", "0.32.0", "0.5.6", "known_bad", "rocm-events", "lmcache"),
        ("cuda", None, None, "unknown", "", "lmcache"),
    ],
)
def test_lmcaches_server_has_its_own_pairs(
    vendor: str, vllm: str | None, lmcache: str | None, verdict: str, rule: str, default: str
) -> None:
    found = judge(vendor, vllm, lmcache, connector=MP)
    assert (found.verdict, found.rule) == (verdict, rule)
    assert default_connector(vendor, vllm, lmcache) == default
    assert found.pair.endswith(f"on {vendor} through LMCache's server")


def test_each_connector_has_an_image_whose_pair_works() -> None:
    for connector, name in ((IN_ENGINES, "cuda"), (MP, "cuda-mp")):
        image = image_for("cuda", connector)
        assert image.name == name
        assert judge("cuda", image.vllm, image.lmcache, connector=connector).works
    assert image_for("cpu", MP) is image_for("cpu", IN_ENGINES)
    assert image_for("rocm", MP).name == "rocm", "none works"


def test_the_connector_that_works_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        require_compatible(judge("cuda", "0.32.0", "0.5.6"), allow_untested=False)
    assert caught.value.hint_for("up").startswith("--connector lmcache-mp, or --image cuda;")
    with pytest.raises(ConfigError, match="may never end") as caught:
        require_compatible(judge("rocm", "0.25.1", "0.5.3", connector=MP), allow_untested=False)
    assert "A tested pair" not in caught.value.message, "there is none"
    assert caught.value.hint_for("up").startswith("--connector lmcache; to run it anyway")


@pytest.mark.parametrize(
    ("lmcache", "on", "verdict"),
    [
        ("0.4.3", {"layerwise"}, "known_bad"),
        ("0.4.3", {"layerwise", "save_decode_cache"}, "known_bad"),
        ("0.4.3", (), "unknown"),
        ("0.4.3", {"save_decode_cache"}, "unknown"),
        ("0.4.4", {"layerwise"}, "unknown"),
    ],
)
def test_a_rule_with_an_option_applies_only_if_the_option_is_on(
    lmcache: str, on: Collection[str], verdict: str
) -> None:
    found = judge("cuda", "0.17.1", lmcache, on=on, rules=WITH_OPTION)
    assert found.verdict == verdict
    assert found.rule == ("with-an-option" if verdict == "known_bad" else "")


@pytest.mark.parametrize(("on", "verdict"), [((), "derived"), ({"layerwise"}, "known_bad")])
def test_a_broken_option_beats_a_good_pair(on: Collection[str], verdict: str) -> None:
    engine = load_catalog().engines["rocm-seed"]
    found = judge("rocm", engine.vllm, engine.lmcache, on=on, rules=WITH_OPTION)
    assert found.verdict == verdict


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lmcache", ["0.3.12", "0.4.2", "0.4.3"])
def test_a_pair_that_the_connector_fixes_is_not_broken(lmcache: str, option: str) -> None:
    """B2 and B4, which layer by layer and with decoded tokens bite these releases."""
    assert judge("cuda", "0.17.1", lmcache, on={option}).verdict == "unknown"
    engine = load_catalog().engines["rocm-seed"]
    assert judge("rocm", engine.vllm, engine.lmcache, on={option}).verdict == "derived"


@pytest.mark.parametrize(
    ("spec", "version", "inside"),
    [
        ("", "anything", True),
        ("", "0.1", True),
        ("===nightly", "nightly", True),
        ("===nightly", "nightly2", False),
        ("<=0.5.6", "0.5.6+rocm7.2", True),
        ("<=0.5.6", "0.5.6.post1", False),
        (">=0.26.0.dev0", "0.26.0.dev0", True),
        (">=0.26.0.dev0", "0.25.2.dev9+g1", False),
        ("==0.5.3", "not a version", False),
    ],
)
def test_a_version_is_in_a_range_or_not(spec: str, version: str, inside: bool) -> None:
    assert in_range(spec, version) is inside


class TestRefusals:
    BROKEN = ("cuda", "0.26.0", "0.5.6")
    STRANGE = ("rocm", None, None)

    @pytest.mark.parametrize("allowed", [False, True])
    def test_good_pairs_pass_in_silence(self, allowed: bool) -> None:
        for engine in load_catalog().engines.values():
            pair = (engine.vendor or "", engine.vllm, engine.lmcache)
            verdict = judge(*pair, connector=default_connector(*pair))
            assert require_compatible(verdict, allow_untested=allowed) == ""

    def test_a_broken_pair_is_refused_with_its_report_and_a_good_pair(self) -> None:
        with pytest.raises(ConfigError) as caught:
            require_compatible(judge(*self.BROKEN), allow_untested=False)
        message = caught.value.message
        assert message.startswith("vLLM 0.26.0 with LMCache 0.5.6 on cuda is broken: ")
        assert "https://github.com/LMCache/LMCache/issues/4463" in message
        assert "vLLM 0.25.1 with LMCache 0.5.3 (profile 'cuda')" in message
        assert caught.value.hint.startswith("--image cuda; ")

    def test_an_unknown_pair_is_refused_with_the_option_that_allows_it(self) -> None:
        with pytest.raises(ConfigError, match="the versions in the image are not known") as caught:
            require_compatible(judge(*self.STRANGE), allow_untested=False)
        assert "profile 'rocm'" in caught.value.message
        assert caught.value.hint.startswith("--image rocm; ")
        assert "--allow-untested" in caught.value.hint

    @pytest.mark.parametrize("pair", [BROKEN, STRANGE], ids=["broken", "strange"])
    def test_broken_and_unknown_pairs_are_warned_of_if_allowed(
        self, pair: tuple[str, str | None, str | None]
    ) -> None:
        verdict = judge(*pair)
        warning = require_compatible(verdict, allow_untested=True)
        assert verdict.pair in warning
        assert verdict.link in warning

    def test_good_pairs_come_from_the_catalogue(self) -> None:
        for vendor in VENDORS:
            default = load_catalog().default_for(vendor)
            assert judge(vendor, None, None).good is default
