"""One real kernel per target, built from end to end, as the build checks it."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from jax_bwgemm.kernels.aot import make, sass
from jax_bwgemm.kernels.aot.catalog import repacks
from jax_bwgemm.kernels.aot.cubin import read_cubin
from jax_bwgemm.runtime.artifacts import Manifest, verify


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel per target, built by the command itself; skipped where the compiler is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl")
    from jax_bwgemm.__main__ import main

    out = tmp_path_factory.mktemp("artifacts")
    assert main(["build", "--only", "sm_*_bf16_bf16_bf16_knn_*x256x64_*_bias_relu", "--out", str(out)]) == 0
    return out


def test_real_kernels(real: Path) -> None:
    entries = Manifest.load(real).entries.values()
    assert {entry.variant.target for entry in entries} == {"sm_90a", "sm_100f"}  # integers have no relu
    assert verify(real) == []
    for entry in entries:
        facts = read_cubin((real / f"{entry.name}.cubin").read_bytes())
        assert facts.entry == entry.entry
        assert (facts.registers, facts.stack_bytes) == (entry.registers, 0)
        assert len(facts.params) == len(entry.recipe.params)
        assert (
            f".target {entry.variant.target}" in gzip.decompress((real / f"{entry.name}.ptx.gz").read_bytes()).decode()
        )


@pytest.mark.long
def test_real_repacks(tmp_path: Path) -> None:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl")
    from jax_bwgemm.__main__ import main

    command = ["build", "--arch", "sm_90a", "--only", "*_8bit", "--out", str(tmp_path)]
    assert main(command) == 0 and verify(tmp_path) == []
    manifest = Manifest.load(tmp_path)
    assert (set(manifest.repacks), manifest.entries) == ({"sm_90a_pad_8bit", "sm_90a_transpose_8bit"}, {})
    for entry in manifest.repacks.values():
        assert (entry.num_threads, entry.smem_bytes) == (256, entry.repack.smem_bytes)
        chunks = 2 if entry.repack.kind == "pad" else 4  # of a thread, each of two loads
        assert (entry.sass["LDG.128"], entry.sass["STG.128"]) == (2 * chunks, chunks)
        assert entry.registers <= 64  # four CTAs an SM
    assert make.build(list(repacks(["sm_90a"]))[::3], tmp_path).num_kept == 2


def test_instructions_of_a_pair(real: Path) -> None:
    """Per k step four MMAs and three loads (A; B in two 64-column boxes), every one of the pair's; eight boxes out."""
    entries = [e for e in Manifest.load(real).entries.values() if e.variant.target != "sm_90a"]
    assert len(entries) == 2  # with and without a scale
    for entry in entries:
        counts = {name: num for name, num in entry.sass.items() if num}
        assert counts == {
            "UTCHMMA": 4, "UTCHMMA.2CTA": 4, "UTMALDG": 3, "UTMALDG.2CTA": 3, "LDTM": 8, "UTMASTG": 8,
            "UTCBAR": 2, "UTCBAR.2CTA": 2, "UTCBAR.MULTICAST": 2,
        }  # fmt: skip
        assert (entry.spill_bytes, entry.tmem_cols, entry.smem_bytes, entry.num_stages) == (0, 512, 230400, 6)


def test_a_hopper_bias_is_loaded_before_the_sums_are_waited_for(real: Path) -> None:
    """By ptxas' order, which is not the program's: one load for each pair of a thread's columns."""
    entries = [e for e in Manifest.load(real).entries.values() if e.variant.target == "sm_90a"]
    (entry,) = (e for e in entries if not e.variant.tile.stream_k)  # which loads it once the other parts are added
    (opcodes,) = sass.disassemble([read_cubin((real / f"{entry.name}.cubin").read_bytes()).text], "sm_90a")
    loads = [i for i, opcode in enumerate(opcodes) if opcode.startswith("LDG.")]
    waits = [i for i, opcode in enumerate(opcodes) if opcode == "WARPGROUP.DEPBAR.LE"]
    assert len(waits) == 2 and len(loads) == 32 and max(loads) < max(waits)


def test_a_real_cubin_with_another_parameter_is_refused(real: Path) -> None:
    """The declared size of the last parameter, 8 bytes, becomes 12 in the cubin's own record."""
    entry = next(iter(Manifest.load(real).entries.values()))
    cubin = (real / f"{entry.name}.cubin").read_bytes()
    offset, size = read_cubin(cubin).params[-1]
    ordinal = len(entry.recipe.params) - 1
    record = ordinal.to_bytes(2, "little") + offset.to_bytes(2, "little")
    at = cubin.index(record, cubin.index(b"\x04\x17\x0c\x00")) + len(record)
    packed = int.from_bytes(cubin[at : at + 4], "little") + (4 << 18)
    doctored = read_cubin(cubin[:at] + packed.to_bytes(4, "little") + cubin[at + 4 :])
    assert doctored.params[-1] == (offset, size + 4)


def test_the_disassembler_is_asked_once_for_many_kernels(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [e for e in Manifest.load(real).entries.values() if e.variant.target == "sm_100f"]
    code = read_cubin((real / f"{entries[0].name}.cubin").read_bytes()).text
    first, second = sass.disassemble([code, code], "sm_100f")
    assert first == second
    assert sass.count(first, sass.kind_of(entries[0].variant)) == entries[0].sass


def test_no_disassembler_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise sass.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sass.importlib.metadata, "files", absent)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="requires nvdisasm, got none; `pip install nvidia-cuda-nvdisasm`"):
        sass.find_nvdisasm()
