"""The same snippets on a Hopper GPU: against the formulas, and bit for bit (or within the stated bound) against the
emulator. PTX is compiled by the driver; nothing here goes through JAX."""

from __future__ import annotations

import dataclasses

import pytest

from jax_bwgemm.emulator import TensorMap
from jax_bwgemm.facts.arch import Arch
from tests.gpu import driver
from tests.snippets.catalogue import ALL
from tests.snippets.kit import Snippet, emulate


@pytest.fixture(autouse=True)
def on_hopper(arch: Arch) -> None:
    if arch.target != "sm_90a":
        pytest.skip(f"the snippets are for sm_90a, this is {arch.target}")


@pytest.mark.parametrize("snippet", ALL, ids=lambda s: s.name)
def test_snippet(snippet: Snippet) -> None:
    try:
        got = driver.execute(snippet)
    except driver.Hang as hang:
        pytest.exit(f"{snippet.name}: {hang}", 1)
    by_formula = snippet.mismatches(got, tuple(r.expected for r in snippet.results))
    by_emulator = snippet.mismatches(got, emulate(snippet))
    assert (by_formula, by_emulator) == ([], []), "hardware differs from the formula, from the emulator"


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("element", driver.TYPES)
def test_the_emulator_reads_the_drivers_tensor_maps(element: str, swizzle: int) -> None:
    driver.context()
    bytewise = element in ("u8", "s8", "e4m3", "e5m2")  # the driver has one type for all of one byte
    size = 1 if bytewise else {"6": 2, "2": 4, "4": 8}[element[-1]]
    sizes, rows = (160, 9, 7, 5, 3), (160 * size, 1600 * size, 16000 * size, 160000 * size)
    for rank in range(1, 6):
        box = (16 // size, 8, 3, 2, 1)[:rank]
        wanted = TensorMap(0x7F00_0000_1000, sizes[:rank], rows[: rank - 1], box, element, swizzle)
        encoded = dataclasses.replace(wanted, element="u8") if bytewise else wanted
        assert TensorMap.decode(bytes(driver.encode(wanted))) == encoded
