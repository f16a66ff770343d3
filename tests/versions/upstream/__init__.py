"""LMCache's own tests, run on each release untouched and with the fixes."""
