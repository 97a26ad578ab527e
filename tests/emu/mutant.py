"""What a mutant is: a rule that breaks one thing in shipped kernels."""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.emu.edits import At, Edit, change, number, operand


def _variant(target: str, tile: Tile, b_major: str = "n") -> Variant:
    return Variant(target, "bfloat16", "bfloat16", "bfloat16", "k", b_major, tile)


KERNELS = {
    "pair": _variant("sm_100f", Tile(256, 256, cta_group=2, cluster_m=2)),
    "single": _variant("sm_100f", Tile(128, 128)),
    "hopper": _variant("sm_90a", Tile(128, 256, cluster_m=2)),
    "few stages": _variant(
        "sm_90a", Tile(192, 96, cluster_m=2, cluster_n=2)
    ),  # released early, beside two store buffers
    "two load": _variant("sm_90a", Tile(64, 112, cluster_m=4, pingpong=True), "k"),  # B, for four
}
PAIR, SINGLE, HOPPER, FEW_STAGES = ("pair",), ("single",), ("hopper",), ("few stages",)
TWO_LOAD = ("two load",)
BLACKWELL, CLUSTERS, ALL = PAIR + SINGLE, PAIR + HOPPER, PAIR + SINGLE + HOPPER


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`edit` makes `name` true of each of the kernels."""

    name: str
    kernels: tuple[str, ...]
    edit: Edit


def no_wait(at: At) -> Edit:
    return change(at, r"mbarrier[^;]*;", "mov.pred P1, -1;")


def other_parity(at: At) -> Edit:
    return operand(at, r"\], (%?\w+),", "xor.b32 {}, 1")


def bits(at: At, mask: int) -> Edit:
    """Flips bits of a constant."""
    return number(at, lambda value: value ^ mask)
