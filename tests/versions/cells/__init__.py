"""One module a bug, named as its fix: `cell()` raises where the bug is and returns where it is not.

`SETTING` (a Setting, or a function that gives one) is what the fix is applied for; `BITES` is one
that a guard must refuse. `cell` raises NotHere where the release has not the feature at all.
"""
