"""The commands, by what they are about; each imports what it needs when it runs."""

from deploy.cli.commands import images, stack, swap

__all__ = ["images", "stack", "swap"]
