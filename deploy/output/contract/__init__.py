"""What `--json` prints, by command, and the state file: an interface for scripts.

Each command prints a dataclass, defined beside what computes it; `documents` lists them.
`scripts/reference.py` makes JSON Schemas and a page of them, and the tests validate what every
command prints against the schemas.
"""

from deploy.output.contract.documents import COMMANDS, STATE, Envelope, Problem

__all__ = ["COMMANDS", "STATE", "Envelope", "Problem"]
