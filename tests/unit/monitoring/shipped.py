"""What the kit ships for Prometheus and Grafana, as tests read it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from deploy.assets import asset

FOLDER = asset("compose", "monitoring", "dashboards")
# Names on the metrics pages of real stacks, recorded by tests/e2e/one_stack/test_monitoring.py and
# tests/e2e/test_lmcache_server.py.
RECORDED = Path(__file__).resolve().parents[2] / "fixtures" / "metrics"
PROMETHEUS_OWN = {"up", "ALERTS"}
# Recorded by the rules that a stack writes for itself.
LIMITS = {"pdkit:ttft_limit_seconds", "pdkit:itl_limit_seconds"}
METRIC = re.compile(r"\b(?:(?:vllm:|pdkit_|lmcache_mp_)\w+|pdkit:[\w:]+|up(?={)|ALERTS)")
BOARDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))
}
RULES = [
    rule
    for group in yaml.safe_load((FOLDER.parent / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
