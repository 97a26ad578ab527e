"""What happens to finished sums in a thread's registers: the epilogue of a box, and its sum with a residual.

An epilogue begins a box by loading what it reads there, early or late; it is applied to the sums once they are there.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from cutlass import cute

from jax_bwgemm.kernels.boxes import Boxes
from jax_bwgemm.kernels.epilogue import Epilogue, Run
from jax_bwgemm.kernels.params import Params


class Values(Protocol):
    """Which values of a box a thread holds, which is its family's affair; the first row and column are the box's."""

    def runs(self) -> tuple[Run, ...]: ...

    def first_row(self) -> Any: ...

    def first_col(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class BoxEpilogue:
    """Of a thread's values."""

    epilogue: Epilogue
    boxes: Boxes
    values: Values
    params: Params

    def begin(self, at: Any) -> tuple[Any, ...]:
        """Registers with what the epilogue reads for box `at` (m, n, l): the same for all that lie across the result's
        contiguous dimension."""
        boxes, sizes = self.boxes, self.params.sizes
        if boxes.c_major == "n":
            first, size = at[1] * boxes.cols + self.values.first_col(), sizes.n
        else:
            first, size = at[0] * boxes.rows + self.values.first_row(), sizes.m
        return self.epilogue.load(self.values.runs(), first, size, self.params.epilogue)

    def apply(self, sums: cute.Tensor, begun: tuple[Any, ...]) -> None:
        """In place; `begun`: what `begin` returned."""
        self.epilogue.apply(sums, self.values.runs(), begun, self.params.epilogue)


def add_terms(sums: cute.Tensor, terms: cute.Tensor) -> None:
    """Element by element, in one order; by fours, for the compiler keeps more bytes than that in local memory."""
    four = cute.make_layout(4)
    for i in range(0, cute.size(sums), 4):
        own = cute.make_tensor(sums.iterator + i, four)
        own.store(own.load() + cute.make_tensor(terms.iterator + i, four).load().to(sums.element_type))
