"""Multicast masks: bit r stands for the CTA of rank r = x + y * cluster_m in its cluster.

A mask is a compile-time pattern shifted by a run-time rank: `a_pattern << a_shift`. Works on int and on DSL integers.
"""

from __future__ import annotations

from typing import Any

from jax_bwgemm.tile import Tile


def a_pattern(tile: Tile) -> int:
    """CTAs of one row of the cluster: they compute the same rows of the result, so they share A."""
    return sum(1 << (y * tile.cluster_m) for y in range(tile.cluster_n))


def b_pattern(tile: Tile) -> int:
    """CTAs of one column of the cluster and, in a pair, of one parity: they hold the same half of B."""
    return sum(1 << x for x in range(0, tile.cluster_m, tile.cta_group))


def a_shift(tile: Tile, x: Any, y: Any) -> Any:
    """First bit of CTA (x, y)'s row; y is taken so that both shifts have one signature."""
    return x + 0 * y


def b_shift(tile: Tile, x: Any, y: Any) -> Any:
    """First bit of CTA (x, y)'s column and parity."""
    return x % tile.cta_group + y * tile.cluster_m
