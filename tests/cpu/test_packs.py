"""Packs: what was built is found in them, damage is a reason, and the launcher gets files wherever it runs."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import lzma
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fake_machine
import ffi_cases
import pytest
from fake_artifacts import fake_entry, fake_repack
from fake_machine import CUBIN, OK, Machine
from fake_machine import VARIANT as MACHINES_VARIANT
from mutants import mutant

from jax_bwgemm import _files
from jax_bwgemm._files import FileError
from jax_bwgemm.cli.main import main
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.kernels.aot.pack import pack
from jax_bwgemm.runtime import artifacts, packs
from jax_bwgemm.runtime.artifacts import Entry, ManifestError, write_manifest
from jax_bwgemm.runtime.packs import Pack
from jax_bwgemm.runtime.steps import from_steps, to_steps

HOPPER = Variant("sm_90a", *["bfloat16"] * 3, "k", "n", Tile(128, 256, cluster_m=2))
OTHER = Variant("sm_90a", *["float16"] * 3, "k", "n", Tile(128, 128))
BLACKWELL = Variant("sm_100f", *["bfloat16"] * 3, "k", "n", Tile(128, 128))
REPACK = Repack("sm_90a", "pad", 2)
ROOT = Path(__file__).parents[2]


def ptx_of(name: str) -> bytes:
    return f"// {name}\n".encode() * 50 + b"".join(b"add.s32 %%r%d, %%r%d, %%rd1;\n" % (i + 1, i) for i in range(90))


def built(directory: Path, *kernels: Variant | Repack) -> Path:
    """Loose files, as a build leaves them."""
    entries = []
    for kernel in kernels:
        content = gzip.compress(ptx_of(kernel.name), mtime=0)
        (directory / f"{kernel.name}.cubin").write_bytes(kernel.name.encode())
        (directory / f"{kernel.name}.ptx.gz").write_bytes(content)
        entry = fake_entry(kernel) if isinstance(kernel, Variant) else fake_repack(kernel)
        entries.append(dataclasses.replace(entry, ptx_sha256=hashlib.sha256(content).hexdigest()))
    write_manifest(directory, entries, "0.0.0")
    return directory


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "built").mkdir()
    return built(tmp_path / "built", HOPPER, OTHER, BLACKWELL, REPACK)


@pytest.fixture
def packed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as packs, which alone are asked; the cache is a fresh one."""
    assert pack(source, tmp_path / "packed") == {"sm_90a": 3, "sm_100f": 1}
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path / "packed"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packs, "_directories", [])
    monkeypatch.setattr(packs, "_placed", {})
    monkeypatch.setattr(packs, "_temporary", {})
    packs._load.cache_clear()
    packs._opened.cache_clear()
    return tmp_path / "packed"


def test_what_was_built_is_found(packed):
    for kernel in (HOPPER, OTHER, BLACKWELL, REPACK):
        entry = artifacts.find(kernel)
        assert entry.name == kernel.name and artifacts.find(kernel, artifacts.PTX) == entry
        assert artifacts.sha256_of(kernel.name) == hashlib.sha256(kernel.name.encode()).hexdigest()
        assert gzip.decompress(artifacts.find_ptx(kernel).read_bytes()) == ptx_of(kernel.name)
    absent = dataclasses.replace(HOPPER, out_dtype="float32")
    assert artifacts.find(absent) == f"no cubin {absent.name} in {packed}"
    assert artifacts.packed_targets(packed) == ["sm_90a", "sm_100f"]
    assert [artifacts.verify_pack(packed, target) for target in ("sm_90a", "sm_100f")] == [[], []]


def test_planning_opens_nothing_and_a_launch_one_pack_once(packed, monkeypatch):
    opened, read = [], _files.read_xz
    monkeypatch.setattr(_files, "read_xz", lambda path, *sizes: opened.append(path.name) or read(path, *sizes))
    for name in ("sm_100f.json", "sm_100f.cubin.json", "sm_100f.cubin.xz"):
        (packed / name).write_text("nobody reads what another architecture has")
    assert isinstance(artifacts.find(HOPPER), Entry) and isinstance(artifacts.find(OTHER), Entry)
    assert opened == [] and artifacts.launch_dirs() == (packed,)
    for kernel in (HOPPER, OTHER, REPACK, HOPPER):
        assert artifacts.ready(kernel).name == kernel.name
    assert opened == ["sm_90a.cubin.xz"]
    first, second = artifacts.launch_dirs()
    assert first == packed and (second / f"{HOPPER.name}.cubin").read_bytes() == HOPPER.name.encode()
    packs._opened.cache_clear()
    packs._placed.clear()  # as in a new process, for which the files are there
    assert artifacts.ready(HOPPER) == artifacts.find(HOPPER) and opened == ["sm_90a.cubin.xz"]


def test_many_threads_open_it_once(packed, monkeypatch):
    opened, read = [], _files.read_xz
    monkeypatch.setattr(_files, "read_xz", lambda path, *sizes: opened.append(path) or read(path, *sizes))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(artifacts.ready(HOPPER))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [artifacts.find(HOPPER)] * 8 and len(opened) == 1


def test_loose_files_come_first(packed, source):
    late = dataclasses.replace(HOPPER, out_dtype="float32")
    built(packed, late, HOPPER)  # a build in an installation's own directory
    assert isinstance(artifacts.find(late), Entry) and isinstance(artifacts.find(OTHER), Entry)
    assert artifacts.find_ptx(HOPPER) == packed / f"{HOPPER.name}.ptx.gz" and packs.directories() == ()
    (packed / f"{HOPPER.name}.cubin").write_bytes(b"damaged")
    assert artifacts.ready(HOPPER).name == HOPPER.name and len(packs.directories()) == 1


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "endless": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "huge": lambda path: os.truncate(path, 2**26 + 1),
    "damaged": lambda path: path.write_bytes(b"damaged"),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 9),
    "flipped": lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", ["sm_90a.cubin.xz", "sm_90a.cubin.json", "sm_90a.json"])
def test_a_damage_is_a_reason_and_the_next_directory_is_asked(file, damage, packed, source, monkeypatch):
    before = artifacts.find(HOPPER)
    damage(packed / file)
    reason = artifacts.ready(HOPPER)
    assert isinstance(reason, str) and str(packed) in reason
    assert any(remedy in reason for remedy in (packs.REMEDY, artifacts.REMEDY))
    assert artifacts.find(BLACKWELL).name == BLACKWELL.name
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", f"{packed}{os.pathsep}{source}")
    assert artifacts.ready(HOPPER) == before
    if file != "sm_90a.json":
        assert artifacts.verify_pack(packed, "sm_90a") != []
    elif file == "sm_90a.json" and (packed / file).exists():
        with pytest.raises(ManifestError):
            artifacts.verify_pack(packed, "sm_90a")


def index(packed: Path, change) -> None:
    path = packed / "sm_90a.cubin.json"
    fields = json.loads(path.read_text())
    change(fields, next(part for part in fields["parts"] if part[0] == HOPPER.name))
    path.write_text(json.dumps(fields))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))


def repacked(packed: Path, content: bytes) -> None:
    """Another xz file, to whose digest the index says yes."""
    (packed / "sm_90a.cubin.xz").write_bytes(content)
    index(packed, lambda fields, part: fields.update(sha256=hashlib.sha256(content).hexdigest()))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda fields, part: part.__setitem__(1, part[1] - 1), "requires sha256"),
        (lambda fields, part: part.__setitem__(2, part[2] - 1), "requires sha256"),
        (lambda fields, part: part.__setitem__(1, -1), "requires the index of a pack of format 2, got ValueError"),
        (lambda fields, part: part.__setitem__(2, 10**9), "parts that end behind its"),
        (lambda fields, part: part.__setitem__(4, "0" * 64), "requires sha256"),
        (lambda fields, part: part.__setitem__(1, True), "a value of another type"),
        (lambda fields, part: part.append(0), "requires the index of a pack"),
        (lambda fields, part: fields.update(bytes=packs.MOST_BYTES + 1), "are the most"),
        (lambda fields, part: fields.update(bytes=fields["bytes"] + 1), "bytes inside and nothing behind, got less"),
        (lambda fields, part: fields.update(in_steps=1), "a value of another type"),
        (lambda fields, part: fields.update(format=1), "requires the index of a pack of format 2"),
        (lambda fields, part: fields.update(sha256="0" * 64), "requires sha256 0000"),
        (lambda fields, part: fields["parts"].remove(part), f"requires a part {HOPPER.name}, as its manifest says"),
    ],
)
def test_an_index_that_lies_is_a_reason(change, sentence, packed):
    index(packed, change)
    reason = artifacts.ready(HOPPER)
    assert isinstance(reason, str) and sentence in reason and packs.REMEDY in reason
    assert artifacts.verify_pack(packed, "sm_90a") != []


def test_ptx_lies_there_in_steps_and_is_read_as_it_was(packed):
    """By the index, which the digest of what was read confirms."""
    fields = json.loads((packed / "sm_90a.ptx.json").read_text())
    assert fields["in_steps"] and not json.loads((packed / "sm_90a.cubin.json").read_text())["in_steps"]
    opened = lzma.decompress((packed / "sm_90a.ptx.xz").read_bytes())
    assert b"add.s32 %r~2, %r~-1, %rd~0;\n" * 9 in opened and b"%r90" not in opened
    own = Pack.load(packed, "sm_90a.ptx")
    assert own.read(HOPPER.name) == ptx_of(HOPPER.name) and own.parts[HOPPER.name].size == len(ptx_of(HOPPER.name))


def test_steps_that_are_taken_for_text_are_a_reason(packed):
    path = packed / "sm_90a.ptx.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"in_steps": False}))
    with pytest.raises(FileError, match=f"{HOPPER.name} in .* requires sha256"):
        Pack.load(packed, "sm_90a.ptx").read(HOPPER.name)


@pytest.mark.parametrize("text", ["%r07", "%r1 %r~1", "$L__BB0_00"])
def test_steps_refuse_what_they_would_not_give_back(text):
    with pytest.raises(ValueError, match="steps require a text without them"):
        to_steps(text)


def test_steps_of_kernels_that_ship():
    """They give back the PTX, and pack to less than three quarters of it: of all kernels, to little over half."""
    texts = [gzip.decompress(Path(artifacts.find_ptx(x)).read_bytes()).decode() for x in catalogue(["sm_90a"])[:200:4]]
    steps = [to_steps(text) for text in texts]
    assert [from_steps(text) for text in steps] == texts
    assert len(lzma.compress("".join(steps).encode())) < 3 / 4 * len(lzma.compress("".join(texts).encode()))


@pytest.mark.long
def test_it_is_opened_no_further_than_its_index_says(packed):
    repacked(packed, lzma.compress(bytes(2**27)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "bytes inside and nothing behind, got more" in artifacts.ready(HOPPER)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB: half of what it holds
    repacked(packed, lzma.compress(b"x", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**29}]))
    assert "Memory usage limit exceeded" in artifacts.ready(HOPPER)
    whole = lzma.compress(b"".join(sorted(x.name.encode() for x in (HOPPER, OTHER, REPACK))))
    for content, why in ((whole[:-1], "got less"), (whole + b"more", "got more"), (b"text" * 9, "requires xz, got")):
        repacked(packed, content)
        assert why in artifacts.ready(HOPPER)


def test_no_damage_of_an_index_is_a_crash(packed):
    path, rng, refused = packed / "sm_90a.cubin.json", random.Random(0), 0
    content = path.read_bytes()
    for i in range(1000):
        path.write_bytes(mutant(content, rng))
        os.utime(path, ns=(i, i))
        found = artifacts.ready(HOPPER)
        refused += isinstance(found, str)
        assert isinstance(found, Entry) or packs.REMEDY in found or str(path) in found
    assert refused > 500


def test_without_lzma(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "lzma", None)
    assert "requires a Python with lzma" in artifacts.ready(HOPPER)


def test_a_file_of_the_cache_that_is_not_the_kernel_is_written_anew(packed):
    path = artifacts.find_ptx(HOPPER)
    assert path.parent.parent == _files.cache_path() and path.parent.stat().st_mode & 0o777 == 0o700
    for content in (b"", b"damaged", gzip.compress(b"another")):
        path.write_bytes(content)
        assert artifacts.find_ptx(HOPPER) == path and gzip.decompress(path.read_bytes()) == ptx_of(HOPPER.name)


def test_without_a_cache_a_directory_of_the_process_serves(packed, tmp_path, monkeypatch):
    (tmp_path / "cache" / "jax_bwgemm").mkdir(parents=True)
    (tmp_path / "cache" / "jax_bwgemm").chmod(0o777)  # others could write there
    monkeypatch.setattr(packs.tempfile, "tempdir", str(tmp_path))
    path = artifacts.find_ptx(HOPPER)
    assert path.parent.parent == tmp_path and path.parent.name.startswith("jax_bwgemm-")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert isinstance(artifacts.ready(OTHER), Entry) and packs.directories() == (path.parent,)
    shutil.rmtree(path.parent)  # as a cleaner of old files does
    assert artifacts.find_ptx(HOPPER).exists()


def test_no_place_for_a_file_is_a_reason(packed, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(packs.tempfile, "tempdir", str(tmp_path / "nowhere"))
    reason = artifacts.ready(HOPPER)
    assert isinstance(reason, str) and "requires a place for a file, got none" in reason
    assert "cannot be made" in reason and "nowhere" in reason
    assert isinstance(artifacts.find(HOPPER), Entry)  # planning needs none


def test_the_directory_ends_with_the_process_that_made_it(packed, tmp_path):
    """And not with a child that was forked."""
    code = """if 1:
        import os, sys
        from pathlib import Path
        from jax_bwgemm.runtime.packs import Pack
        path = Pack.load(Path(sys.argv[1]), "sm_90a.cubin").as_file(sys.argv[2], "cubin")
        child = os.fork()
        if child == 0:
            own = Pack.load(Path(sys.argv[1]), "sm_90a.ptx").as_file(sys.argv[2], "ptx.gz")
            assert own.parent != path.parent, own
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0 and path.exists()
        print(path)
    """
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"XDG_CACHE_HOME": os.devnull, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", code, str(packed), HOPPER.name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path / "tmp")), done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.usefixtures("packed")
@pytest.mark.skipif(any(mark.args[0] for mark in fake_machine.needs), reason="needs the library and a C++ compiler")
def test_the_launcher_finds_what_was_packed(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    packs.write(tmp_path / "machine", "kernels", {"other": b"other", MACHINES_VARIANT: CUBIN})
    machine.set_directories(tmp_path / "machine")
    code, sentence, _ = machine.create(ffi_cases.request())
    assert code != OK and "requires sm_90a_variant.cubin in an artifact directory, got none" in sentence
    Pack.load(tmp_path / "machine", "kernels").as_file(MACHINES_VARIANT, "cubin")
    machine.set_directories(tmp_path / "machine", *packs.directories())
    assert machine.execute(machine.ready(ffi_cases.request())) == (OK, "")


def test_packing(source, tmp_path):
    """The same bytes from the same kernels; packs of targets that are gone go, other files stay."""
    out = tmp_path / "out"
    pack(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert sorted(before) == sorted(f"{t}.{x}" for t in ("sm_90a", "sm_100f") for x in (
        "json", "cubin.json", "cubin.xz", "ptx.json", "ptx.xz"))  # fmt: skip
    pack(source, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "README").touch()
    built(source, HOPPER)
    assert pack(source, out) == {"sm_90a": 1}
    assert {path.name.partition(".")[0] for path in out.iterdir()} == {"sm_90a", "README"}
    with pytest.raises(FileError, match="requires a part nothing, got none"):
        Pack.load(out, "sm_90a.cubin").read("nothing")


def test_what_is_not_as_it_was_built_is_not_packed(source, tmp_path, capsys):
    (source / f"{OTHER.name}.cubin").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="packs require kernels as they were built: .*requires sha256"):
        pack(source, tmp_path / "out")
    with pytest.raises(ManifestError, match="no cubins"):
        pack(tmp_path, tmp_path / "out")
    assert main(["build", "--only", "sm_90a_pad_8bit", "--packs", "/dev/null/here"]) == 2
    assert "/dev/null/here cannot be written: Not a directory" in capsys.readouterr().err
