"""The Hopper loops: in the emulator, as cubins, and through the measuring command on a driver that emulates."""

from __future__ import annotations

import ctypes as c
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.long

pytest.importorskip("cutlass", reason="the rungs are compiled by CuTeDSL")
ROOT = Path(__file__).parents[2]
LADDER = ROOT / "examples" / "ladder"
sys.path.insert(0, str(LADDER))

import _bfloat16  # noqa: E402
import _cli  # noqa: E402
import _common  # noqa: E402
import _driver  # noqa: E402
import _gpu  # noqa: E402
import _launch  # noqa: E402
import hopper  # noqa: E402
import hopper_measure  # noqa: E402
import hopper_table  # noqa: E402

from jax_bwgemm.emulator import Fault, Launch, Memory, Schedule, TensorMap, run  # noqa: E402
from jax_bwgemm.kernels.aot import sass  # noqa: E402
from jax_bwgemm.kernels.aot.cubin import read_cubin  # noqa: E402

PAGE = ROOT / "docs" / "hopper.md"
# (m, n, k): less than a step, less and more steps than stages; more rows of tiles than are walked together; edges.
SHAPES = [(256, 512, 128), (328, 776, 712), (2312, 264, 72), (8, 8, 8)]
RUNS = [(name, shape) for name in hopper.RUNGS for shape in SHAPES]
SCHEDULES = [("normal", Schedule.standard(1)[1]), ("integers", Schedule.standard(2)[4])]


def text(x: Any) -> Any:
    return "x".join(map(str, x)) if isinstance(x, tuple) else getattr(x, "name", x)


@pytest.mark.parametrize(("kind", "schedule"), SCHEDULES, ids=text)
@pytest.mark.parametrize(("name", "shape"), RUNS, ids=text)
def test_rung(name: str, shape: tuple[int, int, int], kind: str, schedule: Schedule) -> None:
    a, b = _common.operands(kind, shape, seed=schedule.seed)
    rung = _common.rung_of(name)
    out, counters = _common.emulate(rung, a, b, schedule)
    is_exact = kind == "integers" and shape[2] <= 128  # sums of at most 4 * 64: bfloat16 has them all, almost surely
    assert _common.relative_error(out, a, b) <= (0.0 if is_exact else _common.BOUND)
    found, steps, (tiles_m, tiles_n) = (
        _cli.counts(rung, shape, counters),
        -(-shape[2] // 64),
        rung.cta_tiles(*shape[:2]),
    )
    assert found["bytes of A"] == steps * 128 * 128
    assert found["bytes of B"] * rung.tile.cluster_m == steps * 256 * 128
    assert found["MMA instructions"] == tiles_m * tiles_n * steps * 4 * 2  # of each of two warpgroups


@pytest.mark.parametrize("name", hopper.RUNGS)
def test_cubin(name: str) -> None:
    """wgmma and TMA, nothing in local memory, and no more of an SM than there is."""
    rung = _common.rung_of(name)
    facts = read_cubin(_common.compile_rung(rung).cubin)
    counts = sass.count(sass.disassemble([facts.text], rung.arch)[0], "hopper")
    assert counts["HGMMA"] and counts["UTMALDG"] and counts["UTMASTG" if rung.store_box else "STG"]
    assert bool(counts["UTMALDG.MULTICAST"]) == (rung.tile.cluster_m > 1)
    assert (counts["STL"], counts["LDL"], facts.stack_bytes) == (0, 0, 0)
    assert facts.num_threads == rung.num_threads
    assert facts.registers * facts.num_threads <= 65536
    assert rung.smem_bytes <= 232448
    # Waiting after each wgmma would serialise them: one wait a step, and one for the last group.
    waits = sum(op.startswith("WARPGROUP.DEPBAR") for op in sass.disassemble([facts.text], rung.arch)[0])
    assert waits == (1 if name in ("hopper_naive", "hopper_compiler_prefetch") else 2)


def test_only_the_loop_differs() -> None:
    """Tile, stages, threads and everything outside the main loop are the same in the first three."""
    first, *others = (_common.rung_of(name) for name in hopper.RUNGS[:3])
    for other in others:
        fields = "tile", "num_stages", "num_threads", "smem_bytes", "store_box", "is_persistent", "arch"
        assert all(getattr(first, field) == getattr(other, field) for field in fields)
    sources = [(LADDER / f"{name}.py").read_text() for name in hopper.RUNGS[:3]]
    stores = {source.partition("    # Store: ")[2].partition("CHANGES")[0] for source in sources}
    setups = {source.partition("@cute.jit")[2].partition("    fill = ")[0] for source in sources}
    assert len(stores) == len(setups) == 1
    naive, by_compiler = (
        source.partition("    # Main loop.")[2].partition("    # Store: ")[0] for source in sources[::2]
    )
    assert by_compiler.replace(", prefetch_stages=PREFETCH", "") == naive != by_compiler


# Steps loaded ahead of their wgmmas, groups in flight; derived by hand from the loops.
OVERLAP = {
    "hopper_naive": (1, 1),
    "hopper_prefetch": (4, 2),  # all stages, before the first wgmma
    "hopper_compiler_prefetch": (3, 1),  # two of the prologue, and the one that is loaded before the first wgmma
    "hopper_warp_specialised": (4, 2),
}


@pytest.mark.parametrize("name", hopper.RUNGS)
def test_overlap(name: str) -> None:
    _, overlap = hopper_table.seen(name)
    assert (overlap.ahead, overlap.groups) == OVERLAP[name]
    assert overlap.steps == (16 if name == "hopper_warp_specialised" else 8)
    assert (overlap.overlapped == 0) == (name == "hopper_naive")


GUARDS = [
    ("hopper_naive", "wgmma.wait_group.sync.aligned \t0;"),
    ("hopper_prefetch", "wgmma.wait_group.sync.aligned \t1;"),
    ("hopper_prefetch", "wgmma.wait_group.sync.aligned \t0;"),
    ("hopper_compiler_prefetch", "wgmma.wait_group.sync.aligned \t0;"),
    ("hopper_warp_specialised", "wgmma.wait_group.sync.aligned \t1;"),
    ("hopper_warp_specialised", "fence.proxy.async.shared::cta;"),
    ("hopper_warp_specialised", "cp.async.bulk.wait_group.read \t3;"),
    ("hopper_warp_specialised", "cp.async.bulk.wait_group.read \t0;"),
]


@pytest.mark.parametrize(("name", "missing"), GUARDS, ids=text)
def test_emulator_refuses_a_loop_without_its_guards(name: str, missing: str) -> None:
    kernel = _common.compile_rung(_common.rung_of(name))
    assert missing in kernel.ptx
    broken = dataclasses.replace(kernel, ptx=kernel.ptx.replace(missing, ""))
    a, b = _common.operands("integers", (256, 512, 512))
    with pytest.raises(Fault):
        _common.emulate(_common.rung_of(name), a, b, kernel=broken, max_clusters=1)


def test_page_has_the_table() -> None:
    table = PAGE.read_text().partition("<!-- hopper.py -->\n")[2].partition("\n<!-- /hopper.py -->")[0]
    assert table == hopper_table.table(hopper.RUNGS), "paste the output of `hopper.py --emulate` into docs/hopper.md"


def test_page_names_every_rung() -> None:
    assert all(f"`{name}`" in PAGE.read_text() and (LADDER / f"{name}.py").exists() for name in hopper.RUNGS)


class Emulated:
    """libcuda.so.1 as far as `_driver` uses it, behind the same C types, with one Hopper GPU: the emulator."""

    def __init__(self, programs: list[tuple[_launch.Facts, bytes]], max_clusters: int = 3) -> None:
        self.programs, self.max_clusters = programs, max_clusters
        self.buffers: dict[int, np.ndarray] = {}
        self.maps: list[TensorMap] = []
        self.launches: list[str] = []
        self.errors: list[BaseException] = []
        for name, types in _driver._SIGNATURES.items():
            done = getattr(self, f"_{name.removesuffix('_v2')}", lambda *_: None)
            setattr(self, name, c.CFUNCTYPE(c.c_int, *types)(self._guarded(done)))

    def _guarded(self, function: Any) -> Any:
        def call(*args: Any) -> int:
            try:
                return function(*args) or 0
            except BaseException as error:  # would vanish in ctypes
                self.errors.append(error)
                return 719

        return call

    def _cuDeviceGetCount(self, out: int) -> None:
        c.c_int.from_address(out).value = 1

    def _cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        c.c_int.from_address(out).value = {75: 9, 76: 0}[attribute]

    def _cuDeviceGetName(self, out: int, size: int, device: int) -> None:
        c.memmove(out, b"emulated\0", 9)

    def _cuDriverGetVersion(self, out: int) -> None:
        c.c_int.from_address(out).value = 13010

    def _cuMemAlloc(self, out: int, size: int) -> None:
        room = np.zeros(size + 256, np.uint8)
        buffer = room[-room.ctypes.data % 256 :][:size]
        self.buffers[buffer.ctypes.data] = buffer
        c.c_uint64.from_address(out).value = buffer.ctypes.data

    def _cuMemFree(self, address: int) -> None:
        del self.buffers[address]

    def _cuMemsetD8(self, address: int, value: int, size: int) -> None:
        self.buffers[address][:size] = value

    def _cuMemcpyHtoD(self, address: int, source: int, size: int) -> None:
        assert self.buffers[address].nbytes == size
        c.memmove(address, source, size)

    def _cuMemcpyDtoH(self, into: int, address: int, size: int) -> None:
        assert self.buffers[address].nbytes == size
        c.memmove(into, address, size)

    def _cuModuleLoadData(self, out: int, image: int) -> None:
        index = next(i for i, (_, cubin) in enumerate(self.programs) if c.string_at(image, len(cubin)) == cubin)
        c.c_void_p.from_address(out).value = index + 1

    def _cuModuleGetFunction(self, out: int, module: int, name: bytes) -> None:
        assert name.decode() == self.programs[module - 1][0].entry
        c.c_void_p.from_address(out).value = module

    def _cuTensorMapEncodeTiled(self, out: int, dtype: int, rank: int, address: int, *rest: int) -> None:
        (dims, strides, box, steps), modes = rest[:4], rest[4:]
        sizes, extents = [*(c.c_uint64 * 2).from_address(dims)], [*(c.c_uint32 * 2).from_address(box)]
        assert (dtype, rank, out % 64, *(c.c_uint32 * 2).from_address(steps)) == (9, 2, 0, 1, 1)
        assert (modes[0], modes[3]) == (0, 0)
        swizzle = {1: 32, 2: 64, 3: 128}[modes[1]]
        stride = c.c_uint64.from_address(strides).value
        self.maps.append(TensorMap(address, tuple(sizes), (stride,), tuple(extents), "bf16", swizzle))
        c.c_uint64.from_address(out).value = len(self.maps)

    def _cuOccupancyMaxActiveClusters(self, out: int, function: int, config: int) -> None:
        c.c_int.from_address(out).value = self.max_clusters

    def _cuEventElapsedTime(self, out: int, start: int, end: int) -> None:
        c.c_float.from_address(out).value = 0.5

    def _cuLaunchKernelEx(self, config: int, function: int, params: int, extra: int) -> None:
        facts, given = self.programs[function - 1][0], _driver.LaunchConfig.from_address(config)
        self.launches.append(facts.name)
        memory = Memory()
        moved = {
            at: memory.register(buffer.view(ml_dtypes.bfloat16), "abc"[i])
            for i, (at, buffer) in enumerate(self.buffers.items())
        }
        pointers = (c.c_uint64 * 6).from_address(params)
        maps = [self.maps[c.c_uint64.from_address(at).value - 1] for at in pointers[: 3 if facts.boxes[2] else 2]]
        values: list[Any] = [dataclasses.replace(each, address=moved[each.address]) for each in maps]
        if not facts.boxes[2]:
            values.append(moved[c.c_uint64.from_address(pointers[2]).value])
        values += [c.c_int32.from_address(at).value for at in pointers[3:]]
        cluster = tuple(given.attrs[0].value[:3])
        assert (given.num_attrs, given.attrs[0].id) == (1, 4)
        launch = Launch(tuple(given.grid), tuple(given.block), tuple(values), cluster, given.smem_bytes, facts.entry)  # type: ignore[arg-type]
        run(_common.compile_rung(_common.rung_of(facts.name)).module, launch, memory)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `--build` writes, and a driver that runs it."""
    _launch.write(tmp_path / "built", hopper.compiled())
    driver = Emulated(_launch.read(tmp_path / "built"))
    monkeypatch.setattr(_driver, "library", lambda: driver)
    monkeypatch.setattr(hopper_measure, "WARM_UP_S", 0.0)
    monkeypatch.setattr(hopper_measure, "REPEATS", 1)
    monkeypatch.setattr(hopper_measure, "_ask_clocks", lambda: None)
    return tmp_path / "built"


def arguments(monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["hopper.py", "--m", "264", "--n", "520", "--k", "136", *map(str, args)])


def test_measures_what_was_built(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Every parameter, tensor map and attribute goes through the driver's C types; the products are checked."""
    out = folder.parent / "new" / "out.json"
    arguments(monkeypatch, "--from", folder, "--json", out, "--commit", "abc")
    hopper.main()
    driver: Any = _driver.library()
    assert not driver.errors and not driver.buffers
    assert driver.launches == [*hopper.RUNGS] * 3  # to check, to warm up, to time
    result = json.loads(out.read_text())
    assert (result["device"], result["arch"], result["driver_cuda"], result["commit"]) == (
        "emulated",
        "sm_90a",
        "13.1",
        "abc",
    )
    assert [row["name"] for row in result["rows"]] == [*hopper.RUNGS]
    assert all(0 < row["error"] <= _bfloat16.BOUND and row["us"] == 500 for row in result["rows"])
    assert all(row["tflops"] == pytest.approx(2 * 264 * 520 * 136 / 500e-6 / 1e12) for row in result["rows"])
    lines = {
        line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("hopper")
    }
    assert [*lines] == [*hopper.RUNGS] and all(line[1] == "500.0" and line[5] == "1.00" for line in lines.values())


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["hopper_prefetch", "hopper_warp_specialised"])
def test_a_single_rung_on_a_gpu(name: str) -> None:
    """The command of each rung, which has the same driver below it."""
    rung, (a, b) = _common.rung_of(name), _common.operands("normal", (264, 520, 136))
    assert _gpu.on_this_gpu(rung) == rung and _gpu.on_this_gpu(_common.rung_of("one_cta")) is None
    out, us = _gpu.run(rung, a, b, repeats=2)
    assert _common.relative_error(out, a, b) <= _common.BOUND and us == 500


def test_a_wrong_product_is_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments(monkeypatch, "--from", folder)
    exact = _bfloat16.product
    monkeypatch.setattr(hopper_measure, "product", lambda a, b: exact(a, b) * 1.01)
    with pytest.raises(SystemExit, match="hopper_naive: the relative error requires at most"):
        hopper.main()


def test_an_element_that_is_not_written_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments(monkeypatch, "--from", folder)
    driver: Any = _driver.library()
    driver.cuLaunchKernelEx = lambda *_: 0
    with pytest.raises(SystemExit, match="every element of c must be written, got 137280 of 137280"):
        hopper.main()


def test_another_gpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments(monkeypatch, "--from", folder)
    monkeypatch.setattr(_driver, "arch", lambda: "sm_100f")
    with pytest.raises(SystemExit, match="hopper_naive requires a GPU of sm_90a, got sm_100f"):
        hopper.main()


def test_a_folder_that_is_not_whole_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = folder / "hopper_prefetch.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="requires the sha256 of rungs.json"):
        _launch.read(folder)
    cubin.unlink()
    with pytest.raises(SystemExit, match="requires a folder that `--build` wrote"):
        _launch.read(folder)


BARE = """
import runpy, sys
for name in ("cutlass", "jax", "jaxlib", "jax_bwgemm", "ml_dtypes", "cuda"):
    sys.modules[name] = None
sys.argv = ["hopper.py", "--from", sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_needs_numpy_alone(folder: Path) -> None:
    """Without CuTeDSL, JAX, this package, ml_dtypes and cuda-python it gets as far as the driver, and says so."""
    command = [sys.executable, "-c", BARE.replace("sys.argv[0]", repr(str(LADDER / "hopper.py"))), str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={"PYTHONPATH": str(LADDER), "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("the loops require a GPU of sm_90a and its driver, got: ")


def test_bfloat16_is_that_of_ml_dtypes() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    values[:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 0, -(1 + 2.0**-8)  # ties to even
    bits = _bfloat16.rounded(values)
    assert (bits == values.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    assert (_bfloat16.widened(bits) == bits.view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_the_page_has_the_measured_table() -> None:
    """And the published pattern holds in the committed result: naive below half, the compiler's within 3 %."""
    result = json.loads((ROOT / "examples" / "ladder" / "results" / "hopper_h200.json").read_text())
    page = (ROOT / "docs" / "hopper.md").read_text()
    rates = {row["name"]: row["tflops"] for row in result["rows"]}
    for row in result["rows"]:
        line = f"| `{row['name']}` | {row['us']:.1f} | {row['tflops']:.1f} | {row['times_naive']:.2f} |"
        assert line in page
    assert rates["hopper_naive"] < 0.5 * rates["hopper_prefetch"]
    assert rates["hopper_compiler_prefetch"] >= 0.97 * rates["hopper_prefetch"]
