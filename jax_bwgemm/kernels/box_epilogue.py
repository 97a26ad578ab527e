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


class Values(Protocol):
    """Which values of a box a thread holds, which is its family's affair; the first row and column are the box's."""

    def runs(self) -> tuple[Run, ...]: ...

    def first_row(self) -> Any: ...

    def first_col(self) -> Any: ...


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
        return self.epilogue.apply(Box(sums, self.values.runs(), matrices, first, size), begun, self._args())

    def _place(self, at: Any, dim: str) -> tuple[Any, Any]:
        """Along m or n, a thread's first place in box `at`, and the size."""
        boxes, sizes = self.boxes, self.params.sizes
        if dim == "n":
            return at[1] * boxes.cols + self.values.first_col(), sizes.n
        return at[0] * boxes.rows + self.values.first_row(), sizes.m

    def _args(self) -> dict[str, Any]:
        return dict(zip(self.epilogue.params, self.params.epilogue, strict=True))
