"""What `--json` prints, by command, and the state file: an interface for scripts.

Nothing runs by these types. `scripts/reference.py` makes JSON Schemas and a page of them, and the
tests validate what every command prints against the schemas.
"""

from deploy.output.contract.documents import COMMANDS, STATE, Envelope, Problem

__all__ = ["COMMANDS", "STATE", "Envelope", "Problem"]
