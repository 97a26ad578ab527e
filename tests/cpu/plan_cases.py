"""Problems and tiles that the tests of legality and of the planner share."""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile

H200, B200 = ARCHS["h200"], ARCHS["b200"]
PROBLEM = Problem(4096, 4096, 4096)
LARGE = Problem(8192, 8192, 8192)
BEST_H200 = Tile(128, 256, cluster_m=2)
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)


def changed(**changes):
    return dataclasses.replace(PROBLEM, **changes)


FP8 = {"a_dtype": "float8_e4m3fn", "b_dtype": "float8_e4m3fn", "b_major": "k"}
INT8 = {"a_dtype": "int8", "b_dtype": "uint8", "b_major": "k", "out_dtype": "int32"}
TF32 = {x: "float32" for x in ("a_dtype", "b_dtype", "out_dtype")}
