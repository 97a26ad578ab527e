"""Multicast masks: bit r stands for the CTA of rank r = x + y * cluster_m in its cluster; a split along k has none.

A mask is a compile-time pattern shifted by a run-time position, on int as on DSL integers.
"""

from __future__ import annotations

from typing import Any

from jax_bwgemm.facts.tile import Tile


def a_mask(tile: Tile, x: Any) -> Any:
    """CTAs of the row of CTA (x, y) in its cluster: they compute the same rows of the result, so they share A."""
    return sum(1 << (row * tile.cluster_m) for row in range(tile.cluster_n)) << x


def b_mask(tile: Tile, x: Any, y: Any) -> Any:
    """CTAs of its column and, in a pair, of its parity: they hold the same half of B."""
    pattern = sum(1 << column for column in range(0, tile.cluster_m, tile.cta_group))
    return pattern << (x % tile.cta_group + y * tile.cluster_m)
