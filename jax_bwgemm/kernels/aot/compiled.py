"""What compiling a kernel gives, of a product and of a repack alike. Needs no compiler to import."""

from __future__ import annotations

import dataclasses

from jax_bwgemm.facts.recipe import Buffer, TensorMap


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel and what its launcher must know. `params`: (source, bytes) of each, in the kernel's order; a
    repack's have names instead, and it has no buffers and maps of its own (`Repack.params`)."""

    cubin: bytes
    ptx: str
    entry: str
    params: tuple[tuple[str, int], ...]
    num_threads: int
    smem_bytes: int
    num_stages: int = 0
    tmem_cols: int = 0
    buffers: tuple[Buffer, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
