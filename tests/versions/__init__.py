"""Every fix against every LMCache that the kit answers for: with the bug, then with the fix."""
