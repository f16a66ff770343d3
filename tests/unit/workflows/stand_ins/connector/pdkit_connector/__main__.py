"""Tells what became of the fixes: what STAND_IN_TRIED says, else that one was applied."""

import json
import os

SOUND = '[["B17", "applied"]]'

print(
    json.dumps(
        {
            "lmcache": "0.5.6",
            "tested": True,
            "fixes": [
                {
                    "id": fix,
                    "state": state,
                    "evidence": f"seen of {fix}",
                    "title": f"bug of {fix}",
                    "link": f"https://example.com/{fix}",
                    "reason": "It loses KV.",
                }
                for fix, state in json.loads(os.environ.get("STAND_IN_TRIED", SOUND))
            ],
        }
    )
)
