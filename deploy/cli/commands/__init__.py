"""The commands, by what they are about; each imports what it needs when it runs."""

from deploy.cli.commands import check, images, patches, stack, swap

__all__ = ["check", "images", "patches", "stack", "swap"]
