"""One module a bug, each with a `FIX`; adding or removing a module needs no other change."""
