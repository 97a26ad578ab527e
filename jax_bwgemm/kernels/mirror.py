"""How the boxes of a symmetric result leave a second time, for their mirror image on the other side of the diagonal.

The image of a box is that box of the transposed result, which is the same array: threads write it to shared memory as
an m-major result's (a transposing stmatrix, on Hopper), from where TMA takes it to (n, m). A cluster tile on the
diagonal is a square that has both sides of it, and has no image: each element of the result is stored once. Both sides
are the same bits there, too, for the tensor cores sum the products of (i, j) as those of (j, i), in the order of k.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import cute

from jax_bwgemm.kernels.boxes import Boxes, TmaParts
from jax_bwgemm.kernels.gemm import GemmFacts
from jax_bwgemm.kernels.operands import coordinate_tensor
from jax_bwgemm.kernels.outlets import StoreGroup, TmaOutlet
from jax_bwgemm.kernels.params import Params


@dataclasses.dataclass(frozen=True)
class Image:
    """A store group's way from its buffers of m-major boxes to the result. `span`: rows and columns of a cluster
    tile."""

    boxes: Boxes
    parts: TmaParts
    span: int

    @cute.jit
    def send(self, at: Any, buffer: cutlass.Constexpr[int]) -> None:
        """A buffer -> the image of the box `at` (m, n, l), by one warp; nothing on the diagonal."""
        if at[0] * self.boxes.rows // self.span != at[1] * self.boxes.cols // self.span:
            self.parts.store(buffer, at)


def images_of(facts: GemmFacts, params: Params, sC: cute.Tensor, group_idx: Any) -> tuple[Image, ...]:
    """That of the result of a symmetric tile, else none. sC: the buffers of all store groups."""
    boxes, sizes = facts.mirror, params.sizes
    if boxes is None:
        return ()
    matrix = coordinate_tensor(False, sizes.m, sizes.n, sizes.batch)
    parts = boxes.tma_parts(params.maps.c[1], boxes.over(sC), group_idx, matrix, params.hints.c_policy)
    return (Image(boxes, parts, facts.tile.span[0]),)


@dataclasses.dataclass(frozen=True)
class MirrorOutlet(TmaOutlet):
    """For the image. Where there is none, all but the store is done: the count of stores in flight is the same."""

    image: Image

    def send(self, at: Any, buffer: int) -> None:
        self.image.send(at, buffer)


def mirror_outlet(image: Image, group: StoreGroup, r2s: Any, Rs: cute.Tensor) -> MirrorOutlet:
    return MirrorOutlet(image.boxes, group, r2s, Rs, image.parts, image)
