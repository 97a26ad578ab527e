"""The repack kernels against NumPy, byte by byte: every kind and element size, edge sizes, any start, poisoned results.

The emulator faults on an access outside the source or the result, on a race and on a missing grid wait.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - registers float8 with NumPy
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.emulator import Counters, Fault, Launch, Memory, Schedule, memory, parse, run
from jax_bwgemm.facts.arch import ARCHS, TARGETS
from jax_bwgemm.facts.repack import ELEMENT_BYTES, KINDS, NUM_THREADS, Repack
from jax_bwgemm.runtime import artifacts, emulated
from tests.emu import shipped

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("large_products")]

SIZES = (1, 7, 8, 9, 63, 64, 65, 127, 128, 129)
SHAPES = [(1 + i % 3, rows, SIZES[(3 * i + 1) % len(SIZES)]) for i, rows in enumerate(SIZES)]
SHAPES += [(1, 1000, 9), (1, 9, 1000), (2, 129, 129), (1, 65, 1000), (3, 1, 1), (5, 1, 128), (1, 1000, 127)]
PITCHES = (16, 128, 16, 32, 128)  # bytes, of which rows of the result are whole multiples
ALL = [Repack("sm_90a", kind, size) for kind, size in itertools.product(KINDS, ELEMENT_BYTES)]
POISON = 0xA5


def built(repack: Repack) -> artifacts.RepackEntry:
    entry = artifacts.find(repack)
    if isinstance(entry, str):
        pytest.skip(entry)
    return entry


def expected(repack: Repack, source: np.ndarray, step_bytes: int = 16) -> np.ndarray:
    moved = source if repack.kind == "pad" else source.swapaxes(1, 2)
    return np.pad(moved, ((0, 0), (0, 0), (0, -moved.shape[2] % (step_bytes // repack.element_bytes))))


def random_source(repack: Repack, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """Any bytes."""
    octets = np.random.default_rng(seed).integers(0, 256, (*shape, repack.element_bytes), np.uint8)
    return octets.view(f"u{repack.element_bytes}")[..., 0]


def launched(
    repack: Repack,
    source: np.ndarray,
    start: int = 0,
    schedule: Schedule | None = None,
    edit: tuple[str, str] = ("", ""),
    extra_ctas: int = 0,
    step_bytes: int = 16,
) -> tuple[np.ndarray, Counters]:
    """The result, in rows of whole `step_bytes`, for a source that starts `start` elements behind a multiple of 256
    bytes."""
    entry = built(repack)
    text = shipped.ptx(entry.name)
    assert edit[0] in text
    shape = expected(repack, source, step_bytes).shape
    out = np.full((*shape, source.itemsize), POISON, np.uint8).view(source.dtype)[..., 0]
    space = Memory()
    addresses = space.register(source, "source", start * source.itemsize), space.register(out, "out")
    grid = repack.num_ctas(shape) + extra_ctas
    params = repack.whole_params((*addresses, *source.shape, shape[2]), grid)
    launch = Launch((grid, 1, 1), (NUM_THREADS, 1, 1), params, smem_bytes=entry.smem_bytes)
    counters = run(parse(text.replace(*edit)), launch, space, schedule, demand_grid_wait=True)
    return out, counters


@pytest.mark.parametrize("repack", ALL, ids=lambda repack: repack.name)
def test_against_numpy(repack: Repack) -> None:
    rng = np.random.default_rng(repack.element_bytes)
    for i, shape in enumerate(SHAPES):
        source = random_source(repack, shape, i)
        start, step = int(rng.integers(16 // repack.element_bytes)), PITCHES[i % len(PITCHES)]
        schedule = Schedule.standard(i)[i % len(Schedule.standard(i))]
        out, _ = launched(repack, source, start, schedule, step_bytes=step)
        said = f"{repack.name} {shape} from element {start} to rows of whole {step} bytes"
        np.testing.assert_array_equal(out, expected(repack, source, step), said)


@pytest.mark.parametrize("repack", ALL, ids=lambda repack: repack.name)
def test_every_start(repack: Repack) -> None:
    """Of the 16 bytes that an aligned load reads, with rows that shift it again."""
    for start in range(16 // repack.element_bytes):
        source = random_source(repack, (2, 70, 19), start)
        np.testing.assert_array_equal(launched(repack, source, start)[0], expected(repack, source))


@pytest.mark.parametrize("target", sorted({arch.target for arch in ARCHS.values()} - {TARGETS[0]}))
def test_other_targets(target: str) -> None:
    for repack in (Repack(target, kind, size) for kind, size in itertools.product(KINDS, ELEMENT_BYTES)):
        source = random_source(repack, (2, 129, 65))
        np.testing.assert_array_equal(launched(repack, source, 1)[0], expected(repack, source))


@pytest.mark.parametrize("repack", ALL, ids=lambda repack: repack.name)
def test_ctas_without_work_touch_nothing(repack: Repack) -> None:
    source = random_source(repack, (2, 33, 35))
    out, _ = launched(repack, source, 1, extra_ctas=9, step_bytes=128)
    np.testing.assert_array_equal(out, expected(repack, source, 128))


@pytest.mark.parametrize("repack", ALL[:3], ids=lambda repack: repack.name)
def test_two_sources(repack: Repack) -> None:
    """Each CTA works on one of them; neither meets the other's end."""
    text, steps = shipped.ptx(built(repack).name), (16, 128)
    for i, shape in enumerate(SHAPES):
        sources = [random_source(repack, own, i) for own in (shape, SHAPES[-1 - i])]
        want = [expected(repack, source, step) for source, step in zip(sources, steps, strict=True)]
        space, outs, params = Memory(), [], []
        for j, (source, own) in enumerate(zip(sources, want, strict=True)):
            outs.append(np.full((*own.shape, source.itemsize), POISON, np.uint8).view(source.dtype)[..., 0])
            start = (i + j) % (16 // repack.element_bytes) * source.itemsize
            params += [space.register(source, "source", start), space.register(outs[-1], "out")]
            params += [*source.shape, own.shape[2]]
        ctas = [repack.num_ctas(own.shape) for own in want]
        launch = Launch((sum(ctas), 1, 1), (NUM_THREADS, 1, 1), repack.whole_params(params, ctas[0]))
        run(parse(text), launch, space, Schedule.standard(i)[i % len(Schedule.standard(i))], demand_grid_wait=True)
        for out, own in zip(outs, want, strict=True):
            np.testing.assert_array_equal(out, own, f"{repack.name} {shape}")


def test_a_transpose_without_its_barrier_is_a_race() -> None:
    repack = Repack("sm_90a", "transpose", 1)
    with pytest.raises(Fault) as caught:
        launched(repack, random_source(repack, (1, 128, 128)), edit=("bar.sync \t0;", ""))
    assert caught.value.rule in ("race", "uninitialised-read")


@pytest.mark.parametrize("repack", ALL[3:], ids=lambda repack: repack.name)
def test_shared_memory_is_accessed_without_bank_conflicts(repack: Repack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each 128 bytes of an access, a quarter warp's where lanes have 16, lie in 32 different banks."""
    wavefronts: list[tuple[int, int]] = []

    def noting(note: Any, w: Any, cta: Any, offsets: np.ndarray, size: int, lanes: Any) -> None:
        words = (offsets[:, None] + np.arange(0, size, 4)) // 4
        parts = words.reshape(-1, 128 // size, size // 4)
        wavefronts.extend((len(np.unique(part)), np.bincount(np.unique(part) % 32).max()) for part in parts)
        note(w, cta, offsets, size, lanes)

    for name in ("note_read", "note_write"):
        monkeypatch.setattr(memory, name, functools.partial(noting, getattr(memory, name)))
    launched(repack, random_source(repack, (1, 128, 128 // repack.element_bytes)))
    assert set(wavefronts) == {(32, 1)} and len(wavefronts) == 2 * 128 * 128 // 128


def operand(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def product(f: Any, *operands: jax.Array) -> tuple[np.ndarray, list[str]]:
    """The result and the names of the kernels that made it."""
    with emulated.recorded() as runs:
        out = np.asarray(jax.block_until_ready(f(*operands)), np.float64)
    return out, [made.name for made in runs]


def matmul(a: Any, b: Any, **options: Any) -> jax.Array:
    return jax_bwgemm.matmul(a, b, emulate="sm_90a", on_fallback="error", **options)


def skip_unless_built(*names: str) -> None:
    kernels = [set(artifacts.Manifest.load(d).kernels) for d in artifacts.artifact_dirs()]
    if missing := set(names) - set().union(*kernels):
        pytest.skip(f"not built: {missing}")


FP8 = [f"sm_90a_e4m3_e4m3_f32_{x}_128x128x128_cta1_cluster1x1_identity" for x in ("kkn", "mkn", "mkm")]
PADS, FLIPS = ("sm_90a_pad_16bit", "sm_90a_pad_8bit"), ("sm_90a_transpose_8bit",)


@pytest.mark.parametrize("majors", ["kn", "kk", "mn", "mk"])
@pytest.mark.parametrize("m, n, k", [(66, 73, 37), (121, 77, 457)])  # to whole 16 bytes; to whole lines
def test_unaligned_rows_are_padded_by_a_repack(m: int, n: int, k: int, majors: str) -> None:
    """Into results that start poisoned: what a kernel multiplies of them must be zeros."""
    skip_unless_built(*PADS)
    a, b = operand((2, m, k), "bfloat16", 0), operand((2, k, n), "bfloat16", 1)
    stored = a if majors[0] == "k" else a.mT, b if majors[1] == "n" else b.mT
    dims = (((2 if majors[0] == "k" else 1,), (1 if majors[1] == "n" else 2,)), ((0,), (0,)))
    f = functools.partial(jax_bwgemm.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    with jax_bwgemm.config(emulate="sm_90a", on_fallback="error"):
        out, names = product(f, *stored)
    assert names[0] == PADS[0] and len(names) == 2  # one launch for both
    np.testing.assert_allclose(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("majors", ["kn", "mn", "mk"])
@pytest.mark.parametrize("m, n", [(48, 32), (40, 21)])  # rows of an MN-major operand as they are; padded
@pytest.mark.parametrize("k", [128, 130, 115])  # as it is; to 144; to a line
def test_float8_of_any_major_on_hopper(majors: str, m: int, n: int, k: int) -> None:
    """b is transposed where neither is k-major, or where it must be padded anyway and the result is stored by rows."""
    skip_unless_built(*FP8, *PADS, *FLIPS)
    a = operand((m, k) if majors[0] == "k" else (k, m), "float8_e4m3fn", 2)
    b = operand((k, n) if majors[1] == "n" else (n, k), "float8_e4m3fn", 3)
    dims = (((majors[0] == "k",), (majors[1] == "k",)), ((), ()))
    f = functools.partial(jax_bwgemm.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    with jax_bwgemm.config(emulate="sm_90a", on_fallback="error"):
        out, names = product(f, a, b)
    flips = majors == "mn" or (majors == "kn" and n == 21)
    assert names.count(FLIPS[0]) == flips
    assert names.count(PADS[1]) == (a.shape[1] % 16 > 0 or (b.shape[1] % 16 > 0 and not flips))  # both in one launch
    x = np.asarray(a, np.float64) if majors[0] == "k" else np.asarray(a, np.float64).T
    y = np.asarray(b, np.float64) if majors[1] == "n" else np.asarray(b, np.float64).T
    np.testing.assert_allclose(out, x @ y, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("n", [32, 33])
def test_under_vmap_and_jit(n: int) -> None:
    """As it lies, or transposed with its padding."""
    skip_unless_built(*FP8, *FLIPS)
    a, b = operand((3, 16, 64), "float8_e4m3fn", 4), operand((3, 64, n), "float8_e4m3fn", 5)
    out, names = product(jax.jit(jax.vmap(functools.partial(matmul, out_dtype="float32"))), a, b)
    assert names[:-1] == [FLIPS[0]] * (n == 33)
    np.testing.assert_allclose(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), rtol=2e-3, atol=2e-2)
