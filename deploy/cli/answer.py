"""What a command hands to the boundary: data for scripts, text for people, how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.errors import PdkitError


@dataclass(frozen=True)
class Answer:
    """A command's result.

    Attributes:
        errors: what went wrong although there is a result, such as a check that failed; the exit
            code is the first one's.
    """

    command: str
    data: Any
    text: str
    errors: Sequence[PdkitError] = ()

    @property
    def exit_code(self) -> int:
        return self.errors[0].exit_code if self.errors else 0
