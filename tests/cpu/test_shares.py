"""The longest tests by shares: each in one of them, and what is no share is refused."""

from __future__ import annotations

import pytest

from tests.shares import in_share, share_of


@pytest.mark.parametrize("count", [1, 3, 4])
def test_each_test_is_in_one_share(count: int) -> None:
    names = [f"tests/emu/test_catalogue.py::test_blackwell[{i}]" for i in range(300)]
    shares = [[name for name in names if in_share(name, share_of(f"{turn}/{count}"))] for turn in range(7, 7 + count)]
    assert sorted(sum(shares, [])) == sorted(names)
    assert min(map(len, shares)) > 300 / count / 2


@pytest.mark.parametrize("text", ["", "3", "1/0", "-1/3", "1/3/3", "a/3"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"JAX_BWGEMM_SHARE requires a form like 7/3"):
        share_of(text)
