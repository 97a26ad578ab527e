"""What is fixed when a GEMM kernel is compiled; both families' alike.

Knows no role and no instruction. The parts of a kernel take from here what they need.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass import Float32, cute

from jax_bwgemm.facts.arch import arch_of
from jax_bwgemm.facts.epilogue import Moves
from jax_bwgemm.facts.problem import COARSE_DTYPES, INT8_DTYPES
from jax_bwgemm.facts.resources import defers_store, loading_ctas, num_stages, num_threads, reads_a_from_registers
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels import pipelines
from jax_bwgemm.kernels.boxes import Boxes, boxes_of
from jax_bwgemm.kernels.epilogue import Chain
from jax_bwgemm.kernels.expression import Expression, epilogue_of
from jax_bwgemm.kernels.operands import ACC_DTYPES, IN_DTYPES, OUT_DTYPES, coordinate_tensor
from jax_bwgemm.kernels.params import Sizes


@dataclasses.dataclass(frozen=True)
class GemmFacts:
    """A variant as its kernel needs it.

    `full_bytes` complete a stage, `residual_bytes` the matrices' boxes of a place. `drains_stages`: shared memory must
    live until all arrivals that empty a stage have come. Hopper: `b_loaders`, of the CTAs that share B those that load
    a part of it, the first of a column; `a_in_registers`, whence wgmma takes A;
    `defers_store`: a tile's rounded boxes leave during the next tile's main loop. `scalars`: roles of the epilogue's.
    `mirror`: of a symmetric tile, how its boxes leave for their mirror image, through the same buffers.
    """

    tile: Tile
    a_dtype: Any
    b_dtype: Any
    acc_dtype: Any
    a_major: str
    b_major: str
    b_loaders: int
    stages: int
    threads: int
    full_bytes: int
    residual_bytes: int
    drains_stages: bool
    a_in_registers: bool
    defers_store: bool
    boxes: Boxes
    epilogue: Chain | Expression
    scalars: tuple[str, ...]
    moves: Moves
    mirror: Boxes | None

    @property
    def cluster(self) -> tuple[int, int, int]:
        return self.tile.cluster_m, self.tile.cluster_n, self.tile.cluster_k

    def epilogue_args(self, scalar: Any, vector: Any) -> tuple[Any, ...]:
        """Stand-ins of the parameters that the epilogue takes, in kernel order."""
        wide = cute.recast_ptr(vector, dtype=Float32)
        return tuple(
            scalar if param in self.scalars else wide if param in self.epilogue.wide_params else vector
            for param in self.epilogue.params
        )

    def coordinate_tensors(self, sizes: Sizes) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """(m, k, l), (n, k, l), (m, n, l): A, B and C as their tensor maps count them."""
        m, n, k, batch = sizes[:4]
        a = coordinate_tensor(self.a_major == "k", m, k, batch)
        b = coordinate_tensor(self.b_major == "k", n, k, batch)
        return a, b, coordinate_tensor(self.boxes.c_major == "n", m, n, batch)

    def store_atoms(self, c: cute.Tensor) -> tuple[Any, ...]:
        """What the kernel stores every result (m, n, l) through, and its mirror image if there is one."""
        if self.mirror is None:
            return tuple(self.boxes.store_atom(c) for _ in range(self.moves.results))
        mirrored = cute.make_tensor(c.iterator, cute.select(c.layout, mode=[1, 0, 2]))
        return self.boxes.store_atom(c), self.mirror.store_atom(mirrored)


def facts_of(variant: Variant) -> GemmFacts:
    tile = variant.tile
    arch = arch_of(variant.target)
    a_dtype, out_dtype = IN_DTYPES[variant.a_dtype], OUT_DTYPES[variant.out_dtype]
    as_mirrored = dataclasses.replace(variant, c_major="m")
    in_registers = reads_a_from_registers(variant.a_dtype, variant.a_major, variant.target)
    return GemmFacts(
        tile=tile,
        a_dtype=a_dtype,
        b_dtype=IN_DTYPES[variant.b_dtype],
        acc_dtype=ACC_DTYPES["int32" if variant.a_dtype in INT8_DTYPES else "float32"],
        a_major=variant.a_major,
        b_major=variant.b_major,
        b_loaders=loading_ctas(tile, "b", variant.b_major),
        stages=num_stages(tile, variant.a_dtype, variant.out_dtype, arch, variant.moves),
        threads=num_threads(tile, variant.target, variant.moves),
        full_bytes=pipelines.full_bytes(tile, variant.a_dtype),
        residual_bytes=pipelines.residual_full_bytes(tile, variant.out_dtype, variant.target, variant.moves),
        drains_stages=pipelines.arrivals_outlive_readers(tile, variant.target),
        a_in_registers=in_registers,
        defers_store=defers_store(tile, variant.out_dtype, variant.store, variant.target, in_registers, variant.moves),
        boxes=boxes_of(variant, out_dtype, in_registers and a_dtype.width == 8),
        epilogue=epilogue_of(variant.steps, variant.c_major, variant.out_dtype in COARSE_DTYPES),
        scalars=tuple(role for role, _ in variant.steps.scalars),
        moves=variant.moves,
        mirror=boxes_of(as_mirrored, out_dtype, False) if tile.symmetric else None,
    )
