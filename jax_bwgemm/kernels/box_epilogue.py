"""What happens to finished sums in a thread's registers: the epilogue of a box, of which a thread holds some values.

An epilogue begins a box by loading what it reads there, early or late; it is applied to the sums once they are there.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from cutlass import cute

from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.epilogue import Box, Chain, Matrices, Run
from jax_bwgemm.kernels.expression import Expression
from jax_bwgemm.kernels.params import Params
from jax_bwgemm.kernels.reductions import Fold, Side, begin, places_of


class Values(Protocol):
    """Which values of a box a thread holds, which is its family's affair; the first row and column are the box's."""

    def runs(self) -> tuple[Run, ...]: ...

    def first_row(self) -> Any: ...

    def first_col(self) -> Any: ...

    def row_lanes(self) -> tuple[int, ...]:
        """The bits in which lanes differ that have other rows of the same columns, the highest first."""

    def col_lanes(self) -> tuple[int, ...]:
        """The bits in which lanes differ that have other columns of the same rows."""

    def warp(self) -> Any:
        """Which of the box's warps the thread's is."""


def no_matrices() -> tuple[cute.Tensor, ...]:
    return ()


@dataclasses.dataclass(frozen=True)
class BoxEpilogue:
    """Of a thread's values."""

    epilogue: Chain | Expression
    boxes: Boxes
    values: Values
    params: Params

    def begin(self, at: Any) -> tuple[Any, ...]:
        """Registers with what the epilogue reads for box `at` (m, n, l): the same for all that lie across the result's
        contiguous dimension."""
        first, size = self._place(at, self.boxes.c_major)
        return self.epilogue.load(self.values.runs(), first, size, self._args())

    def apply(
        self, sums: tuple[cute.Tensor, ...], begun: tuple[Any, ...], at: Any, matrices: Matrices = no_matrices
    ) -> tuple[cute.Tensor, ...]:
        """The results of box `at`, perhaps in the registers of the sums; `begun`: what `begin` returned."""
        first, size = self._place(at, "m" if self.boxes.c_major == "n" else "n")
        runs, args, folds = self.values.runs(), self._args(), self._folds(at)
        results = self.epilogue.apply(Box(sums, runs, matrices, first, size, folds), begun, args)
        for fold in folds:
            fold.end(args[fold.reduction.role], at[2])
        return results

    def _folds(self, at: Any) -> tuple[Fold, ...]:
        """Of what the epilogue reduces."""
        if not self.epilogue.reductions:
            return ()
        runs, boxes = self.values.runs(), self.boxes
        lanes = {"m": self.values.row_lanes(), "n": self.values.col_lanes()}
        warps = boxes.rows // boxes.warp_rows
        part = {"m": at[0] * warps + self.values.warp(), "n": at[1]}
        own = {"m": boxes.warp_rows, "n": boxes.cols}
        along, across = places_of(runs)
        sides = {}
        for dim, places in ((boxes.c_major, along), ("m" if boxes.c_major == "n" else "n", across)):
            first, size = self._place(at, dim)
            sides[dim] = Side(places, lanes[dim], first, size, part[dim], (size + (own[dim] - 1)) // own[dim])
        return tuple(begin(x, sides, runs, boxes.c_major) for x in self.epilogue.reductions)

    def _place(self, at: Any, dim: str) -> tuple[Any, Any]:
        """Along m or n, a thread's first place in box `at`, and the size."""
        boxes, sizes = self.boxes, self.params.sizes
        if dim == "n":
            return at[1] * boxes.cols + self.values.first_col(), sizes.n
        return at[0] * boxes.rows + self.values.first_row(), sizes.m

    def _args(self) -> dict[str, Any]:
        return dict(zip(self.epilogue.params, self.params.epilogue, strict=True))
