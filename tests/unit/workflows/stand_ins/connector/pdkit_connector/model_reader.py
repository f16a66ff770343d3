"""Stands in for the reader of models: answers what the test gives, or that it knows no layers."""

from __future__ import annotations

import json
import os
from pathlib import Path

told = os.environ.get("STAND_IN_READING", "{}")
if file := os.environ.get("STAND_IN_ASKED"):
    with Path(file).open("a") as asked:
        asked.write("asked\n")
answer = {"vllm": "0.32.0", "architecture": "LlamaForCausalLM", "trouble": "", "generates": True}
print(json.dumps({**answer, "layers": None, **json.loads(told)}) if told != "none" else "broken")
