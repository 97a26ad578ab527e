"""Tensor memory of a CTA: 128 lanes x 512 columns of 32 bits, and who has allocated which columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_bwgemm.emulator.engine import Waitable
from jax_bwgemm.emulator.errors import Fault
from jax_bwgemm.emulator.races import Shadow

NUM_LANES, NUM_COLS = 128, 512
LANE_GRANULE = 16  # lanes a shadow entry: two accumulators of M = 64 may share columns, 16 lanes apart


class Tmem(Waitable):
    """Starts as all ones (NaN)."""

    def __init__(self, cta: Any) -> None:
        super().__init__()
        self.cta = cta
        self._data: np.ndarray | None = None
        self._shadow: Shadow | None = None
        self.allocated: dict[int, int] = {}  # first column -> columns
        self.owned = np.zeros(NUM_COLS, bool)
        self.reserved: int | None = None  # columns that a collective allocation has given to this CTA already
        self.relinquished = False
        self.last_cols = NUM_COLS  # of the last allocation

    @property
    def data(self) -> np.ndarray:
        if self._data is None:
            self._data = np.full((NUM_LANES, NUM_COLS), 0xFFFFFFFF, np.uint32)
        return self._data

    @property
    def shadow(self) -> Shadow:
        if self._shadow is None:
            name = f"TMEM of CTA {self.cta.rank_in_grid}"
            self._shadow = Shadow((NUM_LANES // LANE_GRANULE, NUM_COLS), name)
        return self._shadow

    def allocate(self, w: Any, cols: int) -> int | None:
        """The first column, or None while there is no room."""
        if cols not in (32, 64, 128, 256, 512):
            raise w.fault("tmem", f"tcgen05.alloc requires a power of two in 32..512 columns, got {cols}")
        if self.relinquished:
            raise w.fault("tmem", "tcgen05.alloc after relinquish_alloc_permit")
        if cols > self.last_cols:  # PTX ISA, tcgen05.alloc
            raise w.fault("tmem", f"tcgen05.alloc of {cols} columns after one of {self.last_cols}: none may be larger")
        for start in range(0, NUM_COLS - cols + 1, cols):
            if not self.owned[start : start + cols].any():
                self.last_cols = cols
                self.owned[start : start + cols] = True
                self.allocated[start] = cols
                return start
        return None

    def reserve(self, w: Any, cols: int) -> None:
        """Allocates for a warp of this CTA that waits at a collective allocation."""
        self.reserved = self.allocate(w, cols)

    def take(self, w: Any, cols: int) -> int | None:
        """What was reserved, or columns that are free now."""
        column, self.reserved = self.reserved, None
        if column is not None and self.allocated[column] != cols:
            raise w.fault("tmem", f"the CTAs of a pair allocate {self.allocated[column]} and {cols} columns")
        return self.allocate(w, cols) if column is None else column

    def free(self, w: Any, start: int, cols: int) -> None:
        """All accesses to the columns must be known to the warp that frees them."""
        if self.allocated.get(start) != cols:
            raise w.fault("tmem", f"tcgen05.dealloc of {cols} columns at {start}, allocated are {self.allocated}")
        tracker, index = w.cta.cluster.tracker, (slice(None), slice(start, start + cols))
        number = tracker.whole_event(w)
        tracker.write(self.shadow, index, number, w.clock, False)
        self.shadow.forget(index)
        self.data[index] = 0xFFFFFFFF
        del self.allocated[start]
        self.owned[start : start + cols] = False
        self.wake()

    def check(self, w: Any, start: int, cols: int) -> None:
        """Refuses columns that are not allocated."""
        if start < 0 or start + cols > NUM_COLS or not self.owned[start : start + cols].all():
            raise w.fault(
                "tmem",
                f"columns {start}..{start + cols - 1} of CTA {self.cta.rank_in_grid} are not allocated, "
                f"allocated are {self.allocated}",
            )

    def check_exit(self, where: Any) -> None:
        if self.allocated:
            raise Fault("tmem-leak", f"CTA {self.cta.rank_in_grid} ends with TMEM allocated: {self.allocated}", where)


class Meeting(Waitable):
    """Where one warp of each CTA of a pair must come for a collective instruction."""

    def __init__(self) -> None:
        super().__init__()
        self.present: set[int] = set()
        self.generation = 0

    def attend(self, rank: int) -> bool:
        """True for the later of the two."""
        self.present.add(rank)
        if len(self.present) < 2:
            return False
        self.present = set()
        self.generation += 1
        self.wake()
        return True
