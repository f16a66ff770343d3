"""What B17 says of LMCache releases that know no CPU."""

from __future__ import annotations

import pytest
from pdkit_connector.errors import UnsupportedSetting
from pdkit_connector.fixes import b17_cpu_mover as b17
from pdkit_connector.registry import FixState, Setting, apply_fix


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(b17, "_lmcache_device", lambda: None)


def test_a_cpu_engine_is_refused_by_name():
    with pytest.raises(UnsupportedSetting, match=r"starts on cards only.*B17"):
        apply_fix(b17.FIX, Setting(device_type="cpu", engine=True))


@pytest.mark.parametrize("setting", [Setting(), Setting(device_type="cpu")])
def test_without_an_engine_there_is_nothing_to_fix(setting):
    outcome = apply_fix(b17.FIX, setting)
    assert outcome.state is FixState.NOT_APPLICABLE
    assert "cards only" in outcome.evidence


def test_an_engine_on_a_gpu_is_not_refused():
    outcome = apply_fix(b17.FIX, Setting(device_type="cuda", engine=True))
    assert outcome.state is FixState.NOT_APPLICABLE
