"""variant -> cubin, and the launch facts that the cubin itself does not hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cutlass
from cutlass import cute

from jax_bwgemm.arch import ARCHS, family
from jax_bwgemm.kernels.gemm import Sizes
from jax_bwgemm.kernels.operands import DSL_DTYPES, example_tensor
from jax_bwgemm.kernels.sm90 import Sm90Gemm
from jax_bwgemm.kernels.sm100 import Sm100Gemm
from jax_bwgemm.problem import DTYPE_BYTES
from jax_bwgemm.tile import STORE_SWIZZLE_BYTES, SWIZZLE_BYTES, load_box, num_threads, smem_bytes, store_box, tmem_cols
from jax_bwgemm.variant import Variant

FIXED_PARAMS = (("tma_a", 128), ("tma_b", 128), ("tma_c", 128), *((name, 4) for name in Sizes._fields))
PARAM_BYTES = {"alpha": 4, "bias": 8}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel and what its launcher must know."""

    cubin: bytes
    ptx: str
    entry: str
    params: tuple[tuple[str, int], ...]
    num_threads: int
    smem_bytes: int
    num_stages: int
    tmem_cols: int
    tma: dict[str, tuple[tuple[int, int, int], int]]
    cluster: tuple[int, int, int]


def compile_variant(variant: Variant, dump_dir: Path) -> Compiled:
    """Cross-compile one variant; needs no GPU. `dump_dir` must be this call's own: CuTeDSL reuses file names."""
    options = f"--gpu-arch {variant.target} --keep-ptx --keep-cubin --dump-dir={dump_dir}"
    gemm, compiled = compile_host(variant, options)
    artifacts = compiled.artifacts
    arch = next(arch for arch in ARCHS.values() if arch.target == variant.target)
    return Compiled(
        cubin=artifacts.CUBIN,
        ptx=artifacts.PTX,
        entry=next(iter(compiled.kernel_info)),
        params=FIXED_PARAMS + tuple((param, PARAM_BYTES[param]) for param in gemm.epilogue.params),
        num_threads=num_threads(variant.tile, variant.target),
        smem_bytes=smem_bytes(variant.tile, DTYPE_BYTES[variant.a_dtype], arch.smem_bytes),
        num_stages=gemm.stages,
        tmem_cols=tmem_cols(variant.tile) if family(variant.target) == "blackwell" else 0,
        tma=_tma_facts(variant, gemm.tma_boxes),
        cluster=(variant.tile.cluster_m, variant.tile.cluster_n, 1),
    )


def compile_host(variant: Variant, options: str) -> tuple[Any, Any]:
    """(kernel object, CuTeDSL's compiled host function): what `compile_variant` reads and a test links and runs."""
    gemm = (Sm90Gemm if family(variant.target) == "hopper" else Sm100Gemm)(variant)
    type(gemm).kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    a = example_tensor(variant.a_dtype, variant.a_major == "k")
    b = example_tensor(variant.b_dtype, variant.b_major == "k")
    c = example_tensor(variant.out_dtype, True)
    bias = cute.runtime.make_ptr(DSL_DTYPES[variant.out_dtype], 16, cute.AddressSpace.gmem, assumed_align=16)
    sizes = Sizes(*(cutlass.Int32(1) for _ in Sizes._fields))
    return gemm, cute.compile(gemm, a, b, c, sizes, cutlass.Float32(1.0), bias, options=options)


def _tma_facts(variant: Variant, dsl_boxes: dict[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, int, int], int]]:
    """(box, swizzle) per operand from our own rule, checked against what CuTeDSL compiled in."""
    tile, in_bytes = variant.tile, DTYPE_BYTES[variant.a_dtype]
    boxes = {
        "a": load_box(tile, "a", variant.a_major, in_bytes),
        "b": load_box(tile, "b", variant.b_major, in_bytes),
        "c": store_box(tile, variant.out_dtype, variant.target),
    }
    sharing = {"a": tile.cluster_n, "b": tile.cluster_m // tile.cta_group, "c": 1}
    for operand, (inner, outer) in boxes.items():
        ours = (inner, outer * sharing[operand], 1)
        if dsl_boxes[operand] != ours:
            raise RuntimeError(f"the TMA box of {operand} requires {ours}, got {dsl_boxes[operand]} from CuTeDSL")
    swizzle_bytes = {"a": SWIZZLE_BYTES, "b": SWIZZLE_BYTES, "c": STORE_SWIZZLE_BYTES}
    return {operand: ((*box, 1), swizzle_bytes[operand]) for operand, box in boxes.items()}
