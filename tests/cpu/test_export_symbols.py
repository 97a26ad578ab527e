"""Programs for sizes that are symbols: the kernels of their custom calls, and the launches of these for any size."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec
from lowered import BF16, W, calls, operand_barriers, struct

import jax_bwgemm
from jax_bwgemm.cli.explain_json import of_function
from jax_bwgemm.facts.recipe import Attribute
from jax_bwgemm.runtime import ffi

CHECKS = [*jax_bwgemm.export.disabled_checks(), jax.export.DisabledSafetyCheck.platform()]
SIZES = {"i32": int, "f32": float}
NOT_OURS = {"types", "indices_of_shape_operands", "operand_layouts", "result_layouts"}


def symbol(text: str, *constraints: str) -> Any:
    return jax.export.symbolic_shape(text, constraints=constraints)[0]


def matmul(a: Any, b: Any, **kwargs: Any) -> jax.Array:
    return jax_bwgemm.matmul(a, b, **{"device": "h200", "on_fallback": "error"} | kwargs)


def exported(f: Callable[..., Any], *operands: Any) -> jax.export.Exported:
    return jax.export.export(jax.jit(lambda *x: f(*x)), platforms=("cuda",), disabled_checks=CHECKS)(*operands)


def refined(program: jax.export.Exported, *operands: Any) -> str:
    """What XLA is given, for operands of known shapes."""
    from jax._src.lib import _jax

    lowered = jax.jit(program.call).trace(*operands).lower(lowering_platforms=("cuda",))
    given = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(given)
    made = _jax.mlir.refine_polymorphic_shapes(given.getvalue(), True, True)
    with mlir.make_ir_context():
        return str(ir.Module.parse(made))


def shapes_of(call: dict[str, str]) -> list[tuple[int, ...]]:
    """Of operands and results."""
    return [tuple(map(int, text.split("x")[:-1])) for text in re.findall(r"tensor<([^>]*)>", call["types"])]


def attributes_of(call: dict[str, str]) -> dict[str, Attribute]:
    said: dict[str, Attribute] = {}
    for name, text in call.items():
        value, _, of = text.partition(" : ")
        if name.isidentifier() and name not in NOT_OURS:
            said[name] = SIZES[of](value) if of in SIZES else text
    return said


def planned(call: dict[str, str]) -> ffi.LaunchPlan:
    """The launch of a call whose shapes are known."""
    *operands, out = (
        ffi.Buffer.of(buffer.dtype, shape) for buffer, shape in zip(_buffers(call), shapes_of(call), strict=True)
    )
    return ffi.launch_plan(attributes_of(call), operands, [out], 66)


def _buffers(call: dict[str, str]) -> Sequence[Any]:
    from lowered import recipe

    return recipe(call).buffers


CASES = {
    "rows": (lambda x, w: matmul(x, w), lambda m: [struct(m, 256), W]),
    "tokens": (lambda x, w: matmul(x, w), lambda m: [struct(m, 64, 256), W]),
    "batch": (lambda x, y: matmul(x, y), lambda m: [struct(m, 512, 256), struct(m, 256, 512)]),
    "epilogue": (
        lambda x, w, b, r: matmul(x, w, bias=b, activation="relu", residual=r),
        lambda m: [struct(m, 256), W, struct(1024), struct(m, 1024)],
    ),
    "summed": (lambda x, g: matmul(x.T, g), lambda m: [struct(m, 256), struct(m, 1024)]),
    "odd": (lambda x, w: matmul(x, w), lambda m: [struct(m, 1001), struct(1001, 1024)]),
    "gradient": (jax.grad(lambda x, w: matmul(x, w).astype(jnp.float32).sum(), (0, 1)), lambda m: [struct(m, 256), W]),
    "scan": (
        lambda x, ws: jax.lax.scan(lambda x, w: (matmul(x, w), None), x, ws)[0],
        lambda m: [struct(m, 512), struct(3, 512, 512)],
    ),
}


@pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))
@pytest.mark.parametrize("name", CASES)
def test_launches_for_any_size(artifacts_dir: Path, name: str) -> None:
    """Every custom call is legal, with the attributes that it has for all sizes, for each of them."""
    f, operands = CASES[name]
    program = exported(f, *operands(symbol("m", "m <= 8192")))
    said = [attributes_of(call) for call in calls(program.mlir_module())]
    assert said
    for m in (1, 17, 1000, 8192):
        found = calls(refined(program, *operands(m)))
        assert [attributes_of(call) for call in found] == said
        for call in found:
            plan = planned(call)
            batch, rows, columns = shapes_of(call)[-1]
            span = [int(attributes_of(call)[x]) for x in ("cta_m", "cluster_m", "out_n", "cluster_n")]
            if call["c_major"] == "m":
                rows, columns = columns, rows
            assert plan.num_cluster_tiles == batch * -(-rows // (span[0] * span[1])) * -(
                -columns // (span[2] * span[3])
            )


def test_kernels_of_few_and_of_many_rows(artifacts_dir: Path) -> None:
    """A program names those of all parts of the range."""
    program = exported(matmul, struct(symbol("m", "m <= 8192"), 4096), struct(4096, 4096))
    text = program.mlir_module()
    found = calls(text)
    assert len(found) > 2 and text.count('"stablehlo.case"') == 1
    assert {kernel.name for kernel in jax_bwgemm.export.kernels(program)} == {call["variant"] for call in found}
    tile_rows = [int(attributes_of(call)["mma_n" if call["c_major"] == "m" else "cta_m"]) for call in found]
    assert tile_rows[0] <= 64 < tile_rows[-1]
    narrow = exported(matmul, struct(symbol("m", "m >= 4097"), 4096), struct(4096, 4096)).mlir_module()
    assert "stablehlo.case" not in narrow and len(calls(narrow)) == 1


@pytest.mark.parametrize("name", ["rows", "scan"])
@pytest.mark.parametrize("m", [1, 64, 65, 1024, 8192])
def test_one_kernel_is_left_where_the_size_is_known(artifacts_dir: Path, tmp_path: Path, name: str, m: int) -> None:
    """XLA folds the choice: there is no branch in what runs."""
    f = CASES[name][0]
    weights = struct(4096, 4096) if name == "rows" else struct(3, 4096, 4096)
    operands = struct(symbol("m", "m <= 8192"), 4096), weights
    program, (product,) = exported(f, *operands), jax_bwgemm.explain(f, *operands).products
    text = f"{product.kernel} {'; '.join(product.notes)}"
    parts = re.findall(r"(sm_90a_\w+) for m from (\d+) to (\d+)", text)
    (want,) = (name for name, least, most in parts if int(least) <= m <= int(most))
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "simplification"}
    with pytest.raises(Exception, match="No FFI handler registered for jax_bwgemm"):
        jax.jit(program.call).lower(struct(m, 4096), weights).compile(compiler_options=options)
    text = max(tmp_path.glob("*after*"), key=lambda path: path.name).read_text()
    assert "conditional(" not in text
    assert re.findall(r'variant = "(\w+)"', text) == [want]


def test_a_tile_of_the_users_has_all_sizes(artifacts_dir: Path) -> None:
    tile = "128x256x64_cta1_cluster2x1"
    (call,) = calls(exported(lambda x, w: matmul(x, w, tile=tile), struct(symbol("m"), 256), W).mlir_module())
    assert tile in call["variant"]


def test_a_tile_that_is_not_legal_is_told_of_the_symbol(artifacts_dir: Path) -> None:
    with pytest.raises(ValueError, match="cannot compute mx1024x256 .* on h200: `mma_m` requires one of"):
        exported(lambda x, w: matmul(x, w, tile="100x256x64_cta1_cluster2x1"), struct(symbol("m"), 256), W)


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (
            lambda t: [struct(512, 256), struct(256, t)],
            r"TMA requires rows of a multiple of 8 elements .* got t for b: c",
        ),
        (lambda t: [struct(512, t), struct(t, 256)], "got t for a: constrain it, as by `mod"),
        (
            lambda t: [struct(t - 1, 256), struct(256, 1024)],
            "a kernel requires sizes of at least 1, got t - 1 for m, which may be 0",
        ),
    ],
)
def test_what_no_kernel_is_right_for_is_xlas(artifacts_dir: Path, operands: Callable[..., Any], reason: str) -> None:
    given = operands(symbol("t"))
    with pytest.raises(jax_bwgemm.FallbackError, match=reason):
        exported(matmul, *given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_bwgemm.FallbackWarning)
        assert "dot_general" in exported(lambda a, b: matmul(a, b, on_fallback="warn"), *given).mlir_module()


def test_rows_that_are_known_to_be_aligned(artifacts_dir: Path) -> None:
    t = symbol("t", "mod(t, 8) == 0")
    found = calls(exported(matmul, struct(512, t), struct(t, 1024)).mlir_module())
    assert {call["types"].count("?") for call in found} == {2}
    assert calls(exported(matmul, struct(512, 256), struct(256, t)).mlir_module())


def test_xla_pads_what_has_a_symbol(artifacts_dir: Path, repacks_dir: Path) -> None:
    """A repack's call says how many CTAs there are; that of the other operand is of known sizes."""
    program = exported(matmul, struct(symbol("m", "m >= 128"), 1001), struct(1001, 1003))
    names = [kernel.name for kernel in jax_bwgemm.export.kernels(program)]
    assert "sm_90a_pad_16bit" in names
    text = program.mlir_module()
    repacks = [line for line in text.splitlines() if "@jax_bwgemm_repack_v2" in line]
    assert repacks and not any("?" in line for line in repacks)
    assert re.search(r"stablehlo.pad .* -> tensor<1x\?x1024xbf16>", text)


def test_a_slice_is_copied(artifacts_dir: Path) -> None:
    """It may start anywhere, as far as a type tells."""
    m = symbol("m", "m >= 4100")
    text = exported(lambda x, w: matmul(x[1:], w), struct(m, 256), W).mlir_module()
    assert operand_barriers(text) == 1
    assert operand_barriers(exported(matmul, struct(m, 256), W).mlir_module()) == 0


def test_a_mesh(artifacts_dir: Path) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("d"))
    x = jax.ShapeDtypeStruct((symbol("8*m"), 256), BF16, sharding=sharded)
    with pytest.raises(jax_bwgemm.FallbackError, match="over a mesh a kernel requires sizes known at trace time"):
        exported(matmul, x, W)


def test_installed(artifacts_dir: Path) -> None:
    """A weight's gradient is the product as JAX stores it, and transposed: symbols tell no shapes apart."""

    def loss(x: Any, w: Any) -> Any:
        return (x @ w).astype(jnp.float32).sum()

    operands = struct(symbol("m", "m >= 4097"), 4096), struct(4096, 4096)
    with jax_bwgemm.installed(), jax_bwgemm.config(device="h200"):
        text = exported(jax.grad(loss, (0, 1)), *operands).mlir_module()
        forward = exported(lambda x, w: x @ w, *operands).mlir_module()
    assert [call["types"].count("?") for call in calls(forward)] == [2]
    assert len(calls(text)) == 2 and "stablehlo.dot_general" not in text


def test_accelerated(artifacts_dir: Path) -> None:
    f = jax_bwgemm.accelerate(lambda x, w, b: jax.nn.relu(x @ w + b))
    operands = struct(symbol("m", "m >= 4097"), 4096), struct(4096, 4096), struct(4096)
    with jax_bwgemm.config(device="h200"):
        (call,) = calls(exported(f, *operands).mlir_module())
    assert "bias_relu" in call["variant"]


def test_several_platforms(artifacts_dir: Path) -> None:
    """Kernels on CUDA, XLA's product elsewhere, of the same program."""
    operands = struct(symbol("m", "m <= 16"), 256), W
    f = jax.jit(lambda x, w: matmul(x, w, on_fallback="ignore"))
    program = jax.export.export(f, platforms=("cpu", "cuda"), disabled_checks=CHECKS)(*operands)
    assert len(calls(program.mlir_module())) == 1
    x, w = jnp.ones((3, 256), BF16), jnp.ones(W.shape, BF16)
    assert (program.call(x, w) == 256).all()


def test_it_is_said(artifacts_dir: Path) -> None:
    operands = struct(symbol("m", "m <= 8192"), 4096), struct(4096, 4096)
    found = jax_bwgemm.explain(lambda x, w: matmul(x, w), *operands, device="h200")
    (product,) = found.products
    assert product.problem.startswith("mx4096x4096 ") and product.kernel is not None
    (m,) = jax.export.symbolic_shape("m", scope=operands[0].shape[0].scope)
    assert product.flops == found.flops == 2 * m * 4096 * 4096
    assert str(found).splitlines()[0].endswith(" us (33554432*m FLOP, 16384*m + 33554432 B)")
    assert of_function(found)["flops"] == "33554432*m"
    assert re.fullmatch(r"for m from \d+ to 8192", product.notes[0])
    assert re.fullmatch(r"sm_90a_\w+ for m from 1 to \d+", product.notes[1])
    with pytest.raises(ValueError, match="`explain` of two arrays requires sizes that are known, got mx4096x4096 "):
        jax_bwgemm.explain(*operands)
    jax_bwgemm.stats(reset=True)
    program = exported(matmul, *operands)
    assert jax_bwgemm.stats().kernels == {kernel.name: 1 for kernel in jax_bwgemm.export.kernels(program)}


def test_the_emulator_has_known_sizes_alone(artifacts_dir: Path) -> None:
    with pytest.raises(jax_bwgemm.FallbackError, match="the emulator requires sizes known at trace time"):
        jax.export.export(jax.jit(lambda x, w: matmul(x, w, emulate="sm_90a")), platforms=("cpu",))(
            struct(symbol("m"), 256), W
        )
