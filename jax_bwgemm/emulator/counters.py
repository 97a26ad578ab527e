"""What a launch did, counted. CTAs go by their rank in the grid, operands by the name of their tensor map."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

PerCta = collections.Counter[int]
PerOperand = collections.Counter[tuple[str, int]]


def _counter() -> Any:
    return dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass
class Counters:
    """Bytes are by (tensor map, CTA): whole boxes, whatever of them lies outside the tensor.

    `tma_load_bytes`: by the CTA that issues, a multicast box once. `tma_delivered_bytes`: by the CTA that receives.
    `mma_instructions` of a pair count for the CTA that issues, wgmma's once a warpgroup. `waits`: mbarrier waits and
    peeks that succeeded. `dsmem_*_bytes`: loads from and stores to other CTAs' shared memory, by the CTA that issues.
    """

    instructions: int = 0
    tma_load_bytes: PerOperand = _counter()
    tma_delivered_bytes: PerOperand = _counter()
    tma_store_bytes: PerOperand = _counter()
    mma_instructions: PerCta = _counter()
    waits: PerCta = _counter()
    dsmem_load_bytes: PerCta = _counter()
    dsmem_store_bytes: PerCta = _counter()

    @property
    def mmas(self) -> int:
        """MMA instructions of all CTAs."""
        return self.mma_instructions.total()

    @property
    def barrier_waits(self) -> int:
        """Successful mbarrier waits of all CTAs."""
        return self.waits.total()

    def tma_load(self, cta: int, targets: list[int], name: str, size: int) -> None:
        self.tma_load_bytes[name, cta] += size
        for target in targets:
            self.tma_delivered_bytes[name, target] += size

    def tma_store(self, cta: int, name: str, size: int) -> None:
        self.tma_store_bytes[name, cta] += size

    def mma(self, cta: int) -> None:
        self.mma_instructions[cta] += 1

    def wait(self, cta: int) -> None:
        self.waits[cta] += 1

    def dsmem_load(self, cta: int, size: int) -> None:
        self.dsmem_load_bytes[cta] += size

    def dsmem_store(self, cta: int, size: int) -> None:
        self.dsmem_store_bytes[cta] += size
