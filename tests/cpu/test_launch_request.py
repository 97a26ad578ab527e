"""The request of a launch: what a plan and an entry say; and that a recipe alone adds an integer or a result."""

from __future__ import annotations

import dataclasses
import struct

import fake_machine
import ffi_cases
import pytest
from fake_artifacts import fake_entry
from fake_machine import INVALID_ARGUMENT, OK, OUT, Machine, read_map

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import ACC, Apply, Epilogue, Reduction, chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.recipe import Buffer, Recipe, TensorMap, leaf_bytes
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.units import pullback, unit
from jax_bwgemm.facts.variant import variant_for
from jax_bwgemm.kernels.aot.refusals import lay_out
from jax_bwgemm.planner.plan import Plan
from jax_bwgemm.planner.streams import Stream
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.artifacts import Entry
from jax_bwgemm.runtime.launch import Array, Request, request

pytestmark = fake_machine.needs
TILE = Tile(128, 256, cluster_m=2, stream_k=True)
PROBLEM = Problem(1000, 520, 100, 3, b_batch=3, epilogue=chain(0.5, True, "relu", True))
PLAN = Plan(
    PROBLEM, ARCHS["h200"], (), TILE, raster_group=4, raster_along_n=1, raster_order="snake", a_l2="evict_first",
    c_l2="evict_last", pdl=True, stream=Stream(7, 9),
)  # fmt: skip
ENTRY = fake_entry(variant_for(PROBLEM, TILE, "sm_90a"))


def buffers_of(made: Request) -> tuple[list[ffi.Buffer], list[ffi.Buffer]]:
    operands, results = ([ffi.Buffer.of(x.dtype, x.shape) for x in arrays] for arrays in (made.operands, made.results))
    return operands, results


def test_what_a_plan_and_an_entry_say() -> None:
    made = request(PLAN, ENTRY)
    recipe, said = ENTRY.recipe.texts(), made.attributes
    assert recipe == {name: said.pop(name) for name in ("buffers", "tensor_maps", "params")}
    assert said == {
        "variant": ENTRY.name, "entry": "kernel_symbol", "target": "sm_90a", "cubin_sha256": ENTRY.cubin_sha256,
        "cta_m": 128, "mma_n": 256, "out_n": 256, "cluster_m": 2, "cluster_n": 1, "cluster_k": 1, "num_threads": 384,
        "smem_bytes": ENTRY.smem_bytes, "stream_tiles": 7, "stream_clusters": 9, "tile_grid": 0, "rounds": 1,
        "parts": 1, "pdl": 1,
        "raster_group": 4, "raster_along_n": 1, "raster_order": 1, "a_l2": "evict_first", "b_l2": "normal",
        "c_l2": "evict_last", "alpha": 0.5,
    }  # fmt: skip
    assert {type(value) for value in said.values()} == {int, float, str}


def test_buffers_are_as_the_kernel_gets_them() -> None:
    """a's rows of 200 bytes padded to whole 16; a workspace for 66 clusters of two CTAs, or for as many as are said."""
    made = request(PLAN, ENTRY)
    bf16 = "bfloat16"
    assert made.operands == (
        Array(bf16, (1, 1000, 104)), Array(bf16, (3, 100, 520)), Array(bf16, (520,)), Array(bf16, (3, 1000, 520))
    )  # fmt: skip
    assert made.results == (Array(bf16, (3, 1000, 520)), Array("uint8", (4096 + 66 * 2 * 128 * 256 * 4,)))
    assert request(PLAN, ENTRY, 5).results[1] == Array("uint8", (4096 + 5 * 2 * 128 * 256 * 4,))
    swapped = dataclasses.replace(PLAN, problem=PROBLEM.transposed)
    other = request(swapped, fake_entry(variant_for(PROBLEM.transposed, TILE, "sm_90a")))
    assert [x.shape for x in other.operands] == [(3, 100, 520), (1, 1000, 104), (520,), (3, 1000, 520)]
    assert other.results[0].shape == (3, 1000, 520)


def test_a_result_is_never_padded() -> None:
    """Of a unit's pullback, the cotangents of both sums: the second has the role of an operand of gated products."""
    epilogue = pullback("silu", is_gated=True)
    problem = Problem(200, 120, 64, epilogue=epilogue)
    made = request(dataclasses.replace(PLAN, problem=problem), fake_entry(variant_for(problem, TILE, "sm_90a")))
    assert [x.shape for x in made.results[:2]] == [(1, 200, 120)] * 2
    gated = Problem(200, 120, 60, epilogue=unit("silu", is_gated=True))
    tile = dataclasses.replace(TILE, gated=True)
    made = request(dataclasses.replace(PLAN, problem=gated), fake_entry(variant_for(gated, tile, "sm_90a")))
    assert [x.shape for x in made.operands] == [(1, 200, 64), (1, 60, 120), (1, 60, 120)]
    assert made.attributes["mma_n"] == 2 * made.attributes["out_n"]


def test_parts_of_reductions() -> None:
    """One for every 16 rows and for every 32 columns, and for what is left; the launcher knows their sizes, too."""
    relu = Apply("relu", (ACC,))
    reductions = Reduction("total", "sum", "n", relu), Reduction("most", "max", "m", relu)
    problem = Problem(1000, 520, 64, 3, b_batch=3, epilogue=Epilogue(relu, reductions=reductions))
    made = request(dataclasses.replace(PLAN, problem=problem), fake_entry(variant_for(problem, TILE, "sm_90a")))
    parts = Array("float32", (3, 63, 520)), Array("float32", (3, 17, 1000))
    assert made.results[1:3] == parts and made.results[3].dtype == "uint8"
    operands, results = buffers_of(made)
    assert ffi.launch_plan(made.attributes, operands, results, 66).num_buffers == 6
    wrong = [results[0], ffi.Buffer.of("float32", (3, 62, 520)), *results[2:]]
    with pytest.raises(ValueError, match="m of `total` and of the result requires 63, got 62"):
        ffi.launch_plan(made.attributes, operands, wrong, 66)


def test_the_launcher_takes_the_request() -> None:
    plan = ffi.launch_plan(request(PLAN, ENTRY).attributes, *buffers_of(request(PLAN, ENTRY)), 66)
    assert (plan.num_buffers, list(plan.cluster), list(plan.grid)) == (6, [2, 1, 1], [2, 1, 36])


def with_recipe(entry: Entry, sources: list[str], buffers: tuple[Buffer, ...], maps: tuple[TensorMap, ...]) -> Entry:
    leaves = lay_out(tuple((source, leaf_bytes(source)) for source in sources))
    return dataclasses.replace(entry, recipe=Recipe(buffers, maps, leaves))


def test_a_new_integer_is_a_leaf_and_an_attribute() -> None:
    recipe = ENTRY.recipe
    sources = [*(leaf.source for leaf in recipe.params), "int:test_only[-3..]"]
    made = request(PLAN, with_recipe(ENTRY, sources, recipe.buffers, recipe.tensor_maps))
    for value in (-3, 0, 2**31 - 1):
        plan = ffi.launch_plan(made.attributes | {"test_only": value}, *buffers_of(made), 66)
        assert plan.param_block[plan.param_offsets[-1] :] == struct.pack("<i", value)
    with pytest.raises(ValueError, match="`test_only` requires -3..2147483647, got -4"):
        ffi.launch_plan(made.attributes | {"test_only": -4}, *buffers_of(made), 66)
    with pytest.raises(ValueError, match="attribute `test_only` requires an int32, got none"):
        ffi.launch_plan(made.attributes, *buffers_of(made), 66)


def test_a_second_result_is_a_buffer_of_the_recipe() -> None:
    second = Buffer("preactivation", "float32", ("l", "n", "m"), is_result=True)
    recipe = ENTRY.recipe
    buffers, maps = (*recipe.buffers, second), (*recipe.tensor_maps, TensorMap(6, "f32", (32, 64, 1), 128, 16))
    entry = with_recipe(ENTRY, [*(leaf.source for leaf in recipe.params), "tma:6"], buffers, maps)
    made = request(PLAN, entry)
    assert made.results[2] == Array("float32", (3, 520, 1000))
    assert made.attributes["buffers"].endswith(" workspace:uint8[bytes]%16 preactivation:float32[l,n,m]%16")


@pytest.mark.parametrize("leaf", ["tma", "ptr"])
def test_a_second_result_is_launched(machine: Machine, leaf: str) -> None:
    """Of another dtype and another major than the first, moved by TMA or stored by threads."""
    call = ffi_cases.request(has_bias=True)
    call.rules["preactivation"] = "float32[l,n,m]%4"
    call.buffers["preactivation"] = ffi.Buffer.of("float32", (2, 520, 1000))
    call.results = ("out", "preactivation")
    call.leaves.append([f"{leaf}:4", 512, 128 if leaf == "tma" else 8])
    address = OUT + 4096
    if leaf == "tma":
        call.rules["preactivation"] = "float32[l,n,m]%16"
        call.maps["preactivation"] = ffi_cases.TensorMap("f32", [32, 64, 1], 128, 16)
    created = machine.ready(call)
    assert machine.execute(created, preactivation=address) == (OK, "")
    at = sum(size for _, _, size in call.leaves[:-1])  # the stand-in records parameters one behind the other
    params = bytes(machine.launch().params)
    if leaf == "ptr":
        assert struct.unpack_from("<Q", params, at) == (address,)
    else:
        found = read_map(params, at)
        assert (found["address"], found["dims"], found["box"]) == (address, (1000, 520, 2), (32, 64, 1))
        assert (found["dtype"], found["swizzle"], found["strides"]) == (7, 3, (4000, 2080000))
    code, sentence = machine.execute(created, preactivation=address + 2)
    bytes_ = 16 if leaf == "tma" else 4
    assert (code, f"`preactivation` requires a pointer aligned to {bytes_} bytes" in sentence) == (
        INVALID_ARGUMENT,
        True,
    )
    call.buffers["preactivation"] = ffi.Buffer.of("float32", (2, 1000, 520))
    code, sentence, _ = machine.create(call)
    assert (code, sentence) == (INVALID_ARGUMENT, "n of `preactivation` and of the result requires 520, got 1000")


def test_sixteen_buffers(machine: Machine) -> None:
    """As many as there may be, each with a tensor map: more than the block of today's largest kernel."""
    call = ffi_cases.request()
    for i in range(13):
        call.rules[f"r{i}"], call.buffers[f"r{i}"] = call.rules["out"], call.buffers["out"]
        call.maps[f"r{i}"] = call.maps["out"]
        call.leaves.append([f"tma:{3 + i}", 512 + 128 * i, 128])
    call.results = ("out", *(f"r{i}" for i in range(13)))
    plan = call.plan()
    assert (plan.num_buffers, plan.param_bytes) == (16, 512 + 13 * 128)
    assert [use.map_offset for use in plan.buffers[3:]] == [512 + 128 * i for i in range(13)]
    created = machine.ready(call)
    machine.driver.fake_params(None, 0)  # more bytes than the stand-in records
    assert machine.execute(created, **{f"r{i}": OUT for i in range(13)}) == (OK, "")
    assert machine.calls("cuTensorMapEncodeTiled") == 16
