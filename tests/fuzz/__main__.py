"""The long form: `python -m tests.fuzz --rounds N [--seed S]`."""

from __future__ import annotations

import argparse
import random
import time

from tests.fuzz.fuzzers import FUZZERS


def main() -> None:
    """Run every fuzzer and print a row of what it met."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=main.__doc__)
    options.add_argument("--rounds", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=FUZZERS, nargs="+", default=list(FUZZERS))
    given = options.parse_args()
    for name in given.only:
        began = time.process_time()
        seen = FUZZERS[name](random.Random(f"{name} {given.seed}"), given.rounds)
        told = ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()))
        took_s = time.process_time() - began
        print(f"| {name} | {given.rounds:,} | {told} | {took_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
