"""What a command returns: data for scripts, text for people, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.errors import PdkitError

INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits: a bug of pdkit, outside the documented codes


@dataclass(frozen=True)
class CommandResult:
    """A command's result.

    Attributes:
        errors: problems beside the result, such as a failed check; the first one sets the exit
            code.
    """

    command: str
    data: Any
    text: str
    errors: Sequence[PdkitError] = ()

    @property
    def exit_code(self) -> int:
        """The first error's exit code; 0 without errors."""
        return self.errors[0].exit_code if self.errors else 0
