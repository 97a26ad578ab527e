"""variant -> cubin, and the launch facts that the cubin itself does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass
from cutlass import cute

from jax_bwgemm.facts.arch import arch_of, family_of
from jax_bwgemm.facts.recipe import TensorMap, leaf_bytes, map_sources
from jax_bwgemm.facts.resources import loading_ctas, num_threads, smem_bytes, tmem_cols
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, b_roles, buffers, places, tensor_maps
from jax_bwgemm.kernels.aot.compiled import Compiled
from jax_bwgemm.kernels.operands import IN_DTYPES, OUT_DTYPES, example_tensor
from jax_bwgemm.kernels.params import Hints, Order, Shares, Sizes
from jax_bwgemm.kernels.sm90 import Sm90Gemm
from jax_bwgemm.kernels.sm90_direct import Sm90Direct
from jax_bwgemm.kernels.sm90_thin import Sm90Thin
from jax_bwgemm.kernels.sm100 import Sm100Gemm

KERNELS = {"hopper": Sm90Gemm, "blackwell": Sm100Gemm}
RANGES = {"raster_along_n": "[0..1]", "raster_order": "[0..1]"}  # of launch integers that the plan says


def compile_variant(variant: Variant, dump_dir: Path) -> Compiled:
    """Cross-compile one variant; needs no GPU. `dump_dir` must be this call's own: CuTeDSL reuses file names."""
    options = f"--gpu-arch {variant.target} --keep-ptx --keep-cubin --dump-dir={dump_dir}"
    gemm, compiled = compile_host(variant, options)
    artifacts = compiled.artifacts
    arch = arch_of(variant.target)
    return Compiled(
        cubin=artifacts.CUBIN,
        ptx=artifacts.PTX,
        entry=next(iter(compiled.kernel_info)),
        params=params(variant, gemm),
        num_threads=num_threads(variant.tile, variant.target, variant.moves),
        smem_bytes=smem_bytes(variant.tile, variant.a_dtype, variant.out_dtype, arch, variant.moves),
        num_stages=gemm.stages,
        tmem_cols=tmem_cols(variant.tile) if family_of(variant.target).sums_in_tmem else 0,
        buffers=buffers(variant),
        tensor_maps=checked_maps(variant, gemm.tma_boxes),
    )


def kernel_class(variant: Variant) -> Any:
    if variant.tile.is_thin:
        return Sm90Thin
    return Sm90Direct if variant.tile.direct else KERNELS[family_of(variant.target).name]


def compile_host(variant: Variant, options: str) -> tuple[Any, Any]:
    """(kernel object, CuTeDSL's compiled host function): what `compile_variant` reads and a test links and runs."""
    gemm = kernel_class(variant)(variant)
    kernel: Any = type(gemm).kernel
    kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    is_aligned = variant.store == "tma"
    a = example_tensor(IN_DTYPES[variant.a_dtype], variant.a_major == "k")
    b = example_tensor(IN_DTYPES[variant.b_dtype], variant.b_major == "k")
    c = example_tensor(OUT_DTYPES[variant.out_dtype], variant.c_major == "n", is_aligned)
    bias = cute.runtime.make_ptr(OUT_DTYPES[variant.out_dtype], 16, cute.AddressSpace.gmem, assumed_align=16)
    sizes = Sizes(*(cutlass.Int32(1) for _ in Sizes._fields))
    order = Order(*(cutlass.Uint32(1) for _ in Order._fields))
    hints = Hints(*(cutlass.Int64(1) for _ in Hints._fields))
    stream: tuple[Any, ...] = ()
    if "stream_k" not in family_of(variant.target).lacks:
        workspace = cute.runtime.make_ptr(cutlass.Int64, 16, cute.AddressSpace.gmem, assumed_align=16)
        stream = Shares(*(cutlass.Uint32(1) for _ in Shares._fields)), workspace, cutlass.Int64(1)
    return gemm, cute.compile(gemm, a, b, c, sizes, order, hints, *stream, cutlass.Float32(1.0), bias, options=options)


def params(variant: Variant, gemm: Any) -> tuple[tuple[str, int], ...]:
    """(source, bytes) of the kernel's parameters, in its order (docs/architecture.md, kernel parameter block)."""
    at = places(variant)
    moved = [source if source.startswith("tma") else f"ptr:{at[source]}" for source in _moved(variant)]
    tile = variant.tile
    order = [] if tile.direct else [_walk_source(name, tile) for name in Order._fields]
    shares = [_walk_source(name, tile) for name in Shares._fields] if tile.stream_k else []
    stream = [*shares, *(_source(name, at, tile.k_tile) for name in ("workspace", "token"))] if tile.stream_k else []
    sizes, hints = ([_source(name, at, tile.k_tile) for name in bundle._fields] for bundle in (Sizes, Hints))
    named = *sizes, *order, *hints, *stream
    epilogue = [f"ptr:{at[name]}" if name in at else f"float:{name}" for name in gemm.epilogue.params]
    return tuple((source, leaf_bytes(source)) for source in (*moved, *named, *epilogue))


def _moved(variant: Variant) -> list[str]:
    """Operands, results and matrices that the epilogue reads, as `Maps` has them: the source of each, or the role of
    what threads load or store."""
    at, symmetric = places(variant), variant.tile.symmetric
    if variant.tile.direct:
        return ["a", *b_roles(variant), *(role for role, _ in variant.steps.results)]
    operands = [f"{'tma2' if symmetric and role == 'b' else 'tma'}:{at[role]}" for role in ("a", *b_roles(variant))]
    results = [f"tma:{at[role]}" if variant.store == "tma" else role for role, _ in variant.steps.results]
    mirrored = [f"tma2:{at['out']}"] if symmetric else []
    return operands + results + mirrored + [f"tma:{at[x.role]}" for x in variant.steps.operands if x.place == "mn"]


def _source(name: str, at: dict[str, int], k_tile: int) -> str:
    """Of a parameter by its name in the kernel: a size, or what concerns a buffer."""
    if name in ("m", "n", "k", "batch"):
        return f"size:{name}"
    if name == "token":
        return name
    if name == "k_step":
        return f"walk:{name}/{k_tile}"
    if name in at:
        return f"ptr:{at[name]}"
    if name.endswith("_batch_step"):
        return f"step:{at[name.removesuffix('_batch_step')]}"
    return f"l2:{name.removesuffix('_policy')}_l2"


def _walk_source(name: str, tile: Tile) -> str:
    """Of an integer of the plan, or of one that the launcher works out. Operands of an epilogue may have such names."""
    if name in RANGES:
        return f"int:{name}{RANGES[name]}"
    return "walk:triangle" if name == "tiles" and tile.symmetric else f"walk:{name}"


def checked_maps(variant: Variant, dsl_boxes: tuple[tuple[int, ...], ...]) -> tuple[TensorMap, ...]:
    """Our own rule, checked against what CuTeDSL compiled in: boxes before a multicast splits them."""
    maps, moved = tensor_maps(variant), [source for source in _moved(variant) if source.startswith("tma")]
    ours = {source: facts.box for source, facts in zip(map_sources(maps), maps, strict=True)}
    operands = [("a", variant.a_major)] + [("b", variant.b_major)] * variant.tile.num_bs
    for source, (operand, major) in zip(moved, operands, strict=False):  # results come after operands
        inner, outer, batch = ours[source]
        ours[source] = (inner, outer * loading_ctas(variant.tile, operand, major), batch)
    theirs = dict(zip(moved, dsl_boxes, strict=True))
    if ours != theirs:
        raise RuntimeError(f"TMA requires boxes {ours} by parameter, got {theirs} from CuTeDSL")
    return maps
