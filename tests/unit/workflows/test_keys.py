"""The keys of a check are told from each other's and from everybody's, whatever they end in."""

from __future__ import annotations

import pytest

from deploy.workflows.check.keys import CheckKeys


class Keys:
    """A store that counts among the keys that it was given."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def count_marked(self, mark: str) -> int:
        return sum(mark in key for key in self.keys)


@pytest.mark.parametrize("form", ["m@1@0@ab@bf16@{}", "m@1@0@ab@bf16@3@{}"])
@pytest.mark.parametrize("behind", ["", "@kv_layout%1-cpu", "kv_bytes"])
def test_a_tag_is_counted_at_any_position(form: str, behind: str) -> None:
    """Last, as on GPUs; before a layout's, as on CPUs; with what LMCache's own client appends."""
    own = CheckKeys(tagged=True)
    tags = [own.new_tag() for _ in range(12)]
    others = CheckKeys(tagged=True).new_tag()
    store = Keys(*(form.format(f"pdkit%{tag}{behind}") for tag in [*tags, others]))
    assert [own.count(store, tag) for tag in tags] == [1] * 12  # type: ignore[arg-type]


def test_nothing_is_counted_without_tags() -> None:
    own = CheckKeys(tagged=False)
    assert own.new_tag() == ""
    assert own.new_salt() != own.new_salt()
    assert own.count(Keys("a"), "") is None  # type: ignore[arg-type]
