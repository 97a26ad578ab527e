"""variant -> cubin, and the launch facts that the cubin itself does not hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cutlass
from cutlass import cute

from jax_bwgemm.arch import ARCHS, family
from jax_bwgemm.kernels.gemm import Hints, Sizes
from jax_bwgemm.kernels.operands import IN_DTYPES, OUT_DTYPES, example_tensor
from jax_bwgemm.kernels.sm90 import Sm90Gemm
from jax_bwgemm.kernels.sm100 import Sm100Gemm
from jax_bwgemm.tile import num_threads, sharing_ctas, smem_bytes, tmem_cols
from jax_bwgemm.variant import Variant, tma_boxes

PARAM_BYTES = {"tma_a": 128, "tma_b": 128, "tma_c": 128, "tma_r": 128, "c": 8, "alpha": 4, "bias": 8}
STREAM_PARAMS = {"stream_tiles": 4, "stream_clusters": 4, "workspace": 8, "token": 8}
PARAM_BYTES |= STREAM_PARAMS
PARAM_BYTES |= dict.fromkeys(Sizes._fields, 4) | dict.fromkeys(Hints._fields, 8)


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
    tma: dict[str, tuple[tuple[int, int, int], int, int]]


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
        params=tuple((name, PARAM_BYTES[name]) for name in _params(variant, gemm)),
        num_threads=num_threads(variant.tile, variant.target, variant.has_residual),
        smem_bytes=smem_bytes(variant.tile, variant.a_dtype, variant.out_dtype, arch, variant.has_residual),
        num_stages=gemm.stages,
        tmem_cols=tmem_cols(variant.tile) if family(variant.target) == "blackwell" else 0,
        tma=_checked_boxes(variant, gemm.tma_boxes),
    )


def compile_host(variant: Variant, options: str) -> tuple[Any, Any]:
    """(kernel object, CuTeDSL's compiled host function): what `compile_variant` reads and a test links and runs."""
    gemm = (Sm90Gemm if family(variant.target) == "hopper" else Sm100Gemm)(variant)
    type(gemm).kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    is_aligned = variant.store == "tma"
    a = example_tensor(IN_DTYPES[variant.a_dtype], variant.a_major == "k")
    b = example_tensor(IN_DTYPES[variant.b_dtype], variant.b_major == "k")
    c = example_tensor(OUT_DTYPES[variant.out_dtype], variant.c_major == "n", is_aligned)
    bias = cute.runtime.make_ptr(OUT_DTYPES[variant.out_dtype], 16, cute.AddressSpace.gmem, assumed_align=16)
    sizes = Sizes(*(cutlass.Int32(1) for _ in Sizes._fields))
    hints = Hints(*(cutlass.Int64(1) for _ in Hints._fields))
    stream: tuple[Any, ...] = ()
    if family(variant.target) == "hopper":
        workspace = cute.runtime.make_ptr(cutlass.Int64, 16, cute.AddressSpace.gmem, assumed_align=16)
        stream = cutlass.Int32(1), cutlass.Int32(1), workspace, cutlass.Int64(1)
    return gemm, cute.compile(gemm, a, b, c, sizes, hints, *stream, cutlass.Float32(1.0), bias, options=options)


def _params(variant: Variant, gemm: Any) -> tuple[str, ...]:
    out = "tma_c" if variant.store == "tma" else "c"
    residual = ("tma_r",) if variant.has_residual else ()
    stream = STREAM_PARAMS if variant.tile.stream_k else ()
    return "tma_a", "tma_b", out, *residual, *Sizes._fields, *Hints._fields, *stream, *gemm.epilogue.params


def _checked_boxes(variant: Variant, dsl_boxes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Our own rule, checked against what CuTeDSL compiled in: boxes before a multicast splits them."""
    facts = tma_boxes(variant)
    if facts.keys() != dsl_boxes.keys():
        raise RuntimeError(f"TMA requires boxes of {', '.join(facts)}, got {', '.join(dsl_boxes)} from CuTeDSL")
    for operand, ((inner, outer, _), _, _) in facts.items():
        ours = (inner, outer * (sharing_ctas(variant.tile, operand) if operand in "ab" else 1), 1)
        if dsl_boxes[operand] != ours:
            raise RuntimeError(f"the TMA box of {operand} requires {ours}, got {dsl_boxes[operand]} from CuTeDSL")
    return facts
