"""Input that whoever can write to Redis, or plays a Redis, might send: at random, from seeds.

`python -m tests.fuzz --rounds 100000` runs the long form and prints what it did.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "connector"))
