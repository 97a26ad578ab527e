"""The build: what it refuses, what it keeps, what it writes. (`test_build_real` compiles.)"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fcntl
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_files import full_disk

from jax_bwgemm.facts.recipe import Leaf, TensorMap
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant, buffers, tensor_maps
from jax_bwgemm.kernels.aot import make, refusals, sass, sources, worker
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.kernels.aot.compiled import Compiled
from jax_bwgemm.kernels.aot.cubin import Facts, read_cubin
from jax_bwgemm.kernels.aot.worker import Failure
from jax_bwgemm.runtime.artifacts import Entry, Manifest, verify, write_manifest

HOPPER = Tile(128, 256, cluster_m=2)
PAIR = Tile(256, 256, cta_group=2, cluster_m=2)
HOPPER_SASS = ["HGMMA.64x256x16.F32.BF16", "UTMALDG.3D", "UTMALDG.3D.MULTICAST", "UTMASTG.3D", "EXIT"]
PAIR_SASS = ["UTCHMMA.2CTA", "UTMALDG.3D.2CTA", "UTMASTG.3D", "LDTM.x32", "UTCBAR.2CTA.MULTICAST", "EXIT"]


def variant(target: str = "sm_90a", tile: Tile = HOPPER, store: str = "tma") -> Variant:
    return Variant(target, *["bfloat16"] * 3, "k", "n", tile, store=store)


TF32 = Variant("sm_90a", *["float32"] * 3, "m", "k", dataclasses.replace(HOPPER, k_tile=32), c_major="m")


VARIANT = variant()
MAPS = tuple(dataclasses.replace(facts, box=(64, 128, 1), swizzle_bytes=128) for facts in tensor_maps(VARIANT))
COMPILED = Compiled(
    cubin=b"cubin",
    ptx=".version 8.8",
    entry="gemm_0",
    params=(("tma:0", 128), ("size:m", 4), ("ptr:2", 8)),
    num_threads=384,
    smem_bytes=232448,
    num_stages=4,
    buffers=buffers(VARIANT),
    tensor_maps=MAPS[:1],
)


# On sm_90 a cubin's parameters start 48 bytes into their constant bank.
FACTS = Facts("gemm_0", 168, 0, 384, ((48, 128), (176, 4), (184, 8)), b"", "12.9.83")


def refuse(
    compiled: Compiled = COMPILED,
    facts: Facts = FACTS,
    opcodes: list[str] = HOPPER_SASS,  # noqa: B006
    of: Variant | None = None,
) -> str | None:
    of = of or variant()
    return refusals.why_refused(of, compiled, facts, sass.count(opcodes, sass.kind_of(of)))


def test_a_good_kernel_is_not_refused() -> None:
    assert refuse() is None
    assert refuse(opcodes=PAIR_SASS, of=variant("sm_100f", PAIR)) is None


@pytest.mark.parametrize(
    ("compiled", "facts", "sentence"),
    [
        ({}, {"stack_bytes": 16}, r"no stack \(no spills\), got 16 bytes"),
        ({}, {"entry": "other_0"}, "requires the kernel gemm_0, got other_0"),
        ({}, {"num_threads": 256}, "requires 384 threads a CTA, got 256"),
        ({"smem_bytes": 232449}, {}, "requires at most 232448 bytes, got 232449"),
        ({}, {"params": ((48, 128), (176, 4))}, "requires 3 leaves, got 2"),
        (
            {},
            {"params": ((48, 128), (176, 8), (184, 8))},
            r"`size:m` requires \(offset, size\) \(128, 4\), got \(128, 8\)",
        ),
        ({}, {"params": ((48, 128), (176, 4), (192, 8))}, r"`ptr:2` requires .* \(136, 8\), got \(144, 8\)"),
    ],
)
def test_refused_by_the_cubin(compiled: dict[str, Any], facts: dict[str, Any], sentence: str) -> None:
    reason = refuse(dataclasses.replace(COMPILED, **compiled), dataclasses.replace(FACTS, **facts))
    assert reason is not None
    pytest.raises(ValueError, _raise, reason).match(sentence)


@pytest.mark.parametrize(
    ("of", "opcodes", "sentence"),
    [
        (variant(), [o for o in HOPPER_SASS if "HGMMA" not in o], "requires HGMMA instructions, got none"),
        (variant(), [o for o in HOPPER_SASS if "UTMASTG" not in o], "requires UTMASTG instructions, got none"),
        (variant(), [o for o in HOPPER_SASS if "MULTICAST" not in o], "requires UTMALDG.MULTICAST instructions"),
        (variant(), [*HOPPER_SASS, "WARPGROUP.DEPBAR.LE"], "fewer WARPGROUP.DEPBAR than HGMMA, got 1 and 1"),
        (TF32, HOPPER_SASS, "requires LDS instructions, got none"),
        (variant(), [*HOPPER_SASS, "STL.64"], "requires no local memory .* got 1 STL"),
        (variant(), [*HOPPER_SASS, "LDL", "LDL.64"], "requires no local memory .* got 2 LDL"),
        (variant(store="threads"), [*HOPPER_SASS, "STG.E.U16"], "requires STG.128 instructions, got none"),
        (variant("sm_100f", Tile(128, 256)), HOPPER_SASS, "requires UTCHMMA instructions, got none"),
        (variant("sm_100f", PAIR), [*PAIR_SASS, "UTCHMMA"], "every UTCHMMA to be .2CTA, got 1 of 2"),
        (variant("sm_100f", PAIR), [*PAIR_SASS, "UTMALDG.3D"], "every UTMALDG to be .2CTA, got 1 of 2"),
    ],
)
def test_refused_by_the_instructions(of: Variant, opcodes: list[str], sentence: str) -> None:
    reason = refuse(opcodes=opcodes, of=of)
    assert reason is not None
    pytest.raises(ValueError, _raise, reason).match(sentence)


FLIP, FLIP_SASS = Repack("sm_90a", "transpose", 1), ["LDG.E.128", "STS", "BAR.SYNC", "LDS.128", "STG.E.128", "EXIT"]
FLIP_LEAVES = ((0, 8), (8, 8), (16, 4), (20, 4), (24, 4), (28, 4))
FLIP_FACTS = Facts("gemm_0", 53, 0, 256, FLIP_LEAVES, b"", "12.9.83")


@pytest.mark.parametrize(
    ("facts", "opcodes", "sentence"),
    [
        ({}, FLIP_SASS, None),
        ({}, [o for o in FLIP_SASS if "LDG" not in o], "sm_90a_transpose_8bit requires LDG.128 instructions, got none"),
        ({}, ["LDG.E.64" if "LDG" in o else o for o in FLIP_SASS], "requires LDG.128 instructions, got none"),
        ({}, [o for o in FLIP_SASS if o != "STS"], "requires STS instructions, got none"),
        ({}, [*FLIP_SASS, "STL.64"], "requires no local memory .* got 1 STL"),
        ({"stack_bytes": 8}, FLIP_SASS, r"no stack \(no spills\), got 8 bytes"),
        ({"params": FLIP_LEAVES[:5]}, FLIP_SASS, "requires 6 leaves, got 5"),
        ({"num_threads": 128}, FLIP_SASS, "requires 256 threads a CTA, got 128"),
    ],
)
def test_a_repack_is_refused(facts: dict[str, Any], opcodes: list[str], sentence: str | None) -> None:
    compiled = dataclasses.replace(COMPILED, params=FLIP.params, num_threads=256, smem_bytes=FLIP.smem_bytes)
    counts = sass.count(opcodes, "repack")
    reason = refusals.why_refused(FLIP, compiled, dataclasses.replace(FLIP_FACTS, **facts), counts)  # type: ignore[arg-type]
    assert reason is None if sentence is None else re.search(sentence, reason or "")


def _raise(reason: str) -> None:
    raise ValueError(reason)


def test_a_leaf_is_aligned_to_its_size_and_a_descriptor_to_64() -> None:
    leaves = (("size:m", 4), ("tma:0", 128), ("size:n", 4), ("ptr:2", 8))
    assert [p.offset for p in refusals.lay_out(leaves)] == [0, 64, 192, 200]


@pytest.mark.parametrize("content", [b"", b"MZ and more", b"\x7fELF\x02" + bytes(59), b"\x7fELF\x02\x01"])
def test_a_file_that_is_no_cubin_is_a_sentence(content: bytes) -> None:
    with pytest.raises(ValueError, match="a cubin requires"):
        read_cubin(content)


def test_only_is_a_glob_on_names() -> None:
    chosen = make.select(catalogue(["sm_100f"]), "*_knn_*cta2*_identity")
    assert chosen and all(v.tile.cta_group == 2 and v.b_major == "n" for v in chosen)
    with pytest.raises(ValueError, match="`--only` requires a glob that some variant's name matches, got 'nothing'"):
        make.select(chosen, "nothing")


def fake_entry(of: Variant, out: Path, source: str) -> Entry:
    compiled = dataclasses.replace(COMPILED, cubin=of.name.encode())
    facts = dataclasses.replace(FACTS, entry=compiled.entry)
    entry = worker._finish(of, compiled, facts, sass.count(HOPPER_SASS, sass.kind_of(of)), out, source)
    assert isinstance(entry, Entry)
    return entry


class InlinePool:
    """ProcessPoolExecutor that runs at once, here."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, **_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class FakeWorker:
    """Stands for worker.build_batch: remembers what it was asked, fails for names in `bad`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.bad: set[str] = set()

    def __call__(self, variants: list[Variant], out: Path, digests: dict[str, str]) -> list[Entry | Failure]:
        self.asked += [v.name for v in variants]
        made = {v.name: fake_entry(v, out, digests[v.name]) for v in variants if v.name not in self.bad}
        return [made.get(v.name, Failure(v.name, "no")) for v in variants]


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorker]:
    fake = FakeWorker()
    monkeypatch.setattr(make.worker, "build_batch", fake)
    monkeypatch.setattr(make.concurrent.futures, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(sources, "dsl_version", lambda: "1.2.3")
    return fake


VARIANTS = [variant(tile=tile) for tile in (HOPPER, Tile(128, 256, cluster_m=4), Tile(256, 128, cluster_m=2))]


def test_the_second_build_has_nothing_to_do(fake_worker: FakeWorker, tmp_path: Path) -> None:
    first = make.build(VARIANTS, tmp_path)
    before = (tmp_path / "manifest.json").stat().st_mtime_ns
    second = make.build(VARIANTS, tmp_path)
    assert (first.num_built, first.num_kept, second.num_built, second.num_kept) == (3, 0, 0, 3)
    assert sorted(fake_worker.asked) == sorted(v.name for v in VARIANTS)
    assert (tmp_path / "manifest.json").stat().st_mtime_ns == before
    assert verify(tmp_path) == []


def test_only_what_is_damaged_is_built_again(fake_worker: FakeWorker, tmp_path: Path) -> None:
    make.build(VARIANTS, tmp_path)
    fake_worker.asked.clear()
    (tmp_path / f"{VARIANTS[0].name}.cubin").write_bytes(b"damaged")
    (tmp_path / f"{VARIANTS[1].name}.ptx.gz").unlink()
    assert make.build(VARIANTS, tmp_path).num_built == 2
    assert sorted(fake_worker.asked) == sorted(v.name for v in VARIANTS[:2])


def test_changed_sources_build_everything_and_drop_what_was_not_asked(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.build(VARIANTS, tmp_path)
    monkeypatch.setattr(sources, "dsl_version", lambda: "1.2.4")
    assert make.build(VARIANTS[:1], tmp_path).num_built == 1
    assert set(Manifest.load(tmp_path).entries) == {VARIANTS[0].name}
    files = (f"{VARIANTS[0].name}.cubin", f"{VARIANTS[0].name}.ptx.gz", "manifest.json", make.LOCK_NAME)
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_a_new_digest_builds_its_kind_again(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [VARIANTS[0], dataclasses.replace(VARIANTS[0], target="sm_100f")]
    make.build(both, tmp_path)
    before = sources.source_sha256
    changed = lambda v: before(v) + ("" if v.target == "sm_90a" else "changed")  # noqa: E731
    monkeypatch.setattr(sources, "source_sha256", changed)
    fake_worker.asked.clear()
    report = make.build(both, tmp_path)
    assert (report.num_kept, fake_worker.asked) == (1, [both[1].name])


def test_a_selection_keeps_the_others(fake_worker: FakeWorker, tmp_path: Path) -> None:
    make.build(VARIANTS[:2], tmp_path)
    make.build(VARIANTS[2:], tmp_path)
    assert set(Manifest.load(tmp_path).entries) == {v.name for v in VARIANTS}


def test_a_whole_target_drops_what_its_catalogue_lost(fake_worker: FakeWorker, tmp_path: Path) -> None:
    """A kernel that left the catalogue is as current as before: by its digest alone it would stay, and be packed."""
    make.build(VARIANTS, tmp_path)
    for whole, kept in (("sm_100f", VARIANTS), ("sm_90a", VARIANTS[1:])):
        assert make.build(VARIANTS[1:], tmp_path, whole=[whole]).num_built == 0
        names = {v.name for v in kept}
        assert set(Manifest.load(tmp_path).entries) == names
        assert {path.name.split(".")[0] for path in tmp_path.glob("sm_*")} == names


def test_a_refused_variant_is_named_and_its_old_files_go(fake_worker: FakeWorker, tmp_path: Path) -> None:
    make.build(VARIANTS, tmp_path)
    (tmp_path / f"{VARIANTS[0].name}.cubin").write_bytes(b"damaged")
    fake_worker.bad = {VARIANTS[0].name}
    report = make.build(VARIANTS, tmp_path)
    assert report.failures == (Failure(VARIANTS[0].name, "no"),)
    assert set(Manifest.load(tmp_path).entries) == {v.name for v in VARIANTS[1:]}
    assert not (tmp_path / f"{VARIANTS[0].name}.cubin").exists()


def test_a_dead_process_names_every_variant_of_its_batch(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> list[Entry | Failure]:
        raise RuntimeError("a process died")

    monkeypatch.setattr(make.worker, "build_batch", die)
    report = make.build(VARIANTS, tmp_path)
    assert {f.name for f in report.failures} == {v.name for v in VARIANTS}
    assert all(f.reason == "RuntimeError: a process died" for f in report.failures)
    assert Manifest.load(tmp_path).entries == {}


def test_an_interrupt_leaves_a_manifest_of_what_is_done(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(num_done: int, num_all: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "BATCH", 1)
    with pytest.raises(KeyboardInterrupt):
        make.build(VARIANTS, tmp_path, progress=interrupt)
    assert len(Manifest.load(tmp_path).entries) == 1
    assert verify(tmp_path) == []


def test_a_build_that_is_killed_has_left_a_manifest_of_what_was_done(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands while the build goes on."""
    found: list[int] = []

    def look(num_done: int, num_all: int) -> None:
        found.append(len(Manifest.load(tmp_path).entries) if num_done > 1 else 0)

    monkeypatch.setattr(make, "BATCH", 1)
    monkeypatch.setattr(make, "SAVED_SECONDS", 0.0)
    make.build(VARIANTS, tmp_path, progress=look)
    assert found == list(range(len(VARIANTS)))


def test_foreign_files_stay(fake_worker: FakeWorker, tmp_path: Path) -> None:
    """Whatever they are called: what goes is what the manifest listed, or the build was asked for."""
    foreign = ("notes.txt", "sm_90a_mine.cubin", "sm_90a_notes.txt", f"{VARIANTS[0].name}.cubin.bak", "x.cubin.12")
    left = [f"{VARIANTS[0].name}.cubin.123", f"{VARIANTS[1].name}.ptx.gz.123.456"]
    for name in (*foreign, *left):
        (tmp_path / name).write_text("mine")
    make.build(VARIANTS, tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)
    assert not any((tmp_path / name).exists() for name in left)


def test_what_another_version_built_goes(fake_worker: FakeWorker, tmp_path: Path) -> None:
    make.build(VARIANTS, tmp_path)
    fields = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"format": 1}))
    assert make.build(VARIANTS[:1], tmp_path).num_built == 1
    assert [path.name for path in tmp_path.glob("*.cubin")] == [f"{VARIANTS[0].name}.cubin"]


def test_a_link_in_place_of_the_lock_is_not_followed(fake_worker: FakeWorker, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("theirs")
    out = tmp_path / "out"
    out.mkdir()
    (out / make.LOCK_NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        make.build(VARIANTS, out)
    assert (tmp_path / "victim").read_text() == "theirs" and fake_worker.asked == []


def test_builds_of_one_directory_take_turns(fake_worker: FakeWorker, tmp_path: Path) -> None:
    waited: list[bool] = []
    with (tmp_path / make.LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def on_wait() -> None:
            waited.append(fake_worker.asked == [])
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert make.build(VARIANTS, tmp_path, on_wait=on_wait).num_built == len(VARIANTS)
    make.build(VARIANTS, tmp_path, on_wait=on_wait)
    assert waited == [True]


def test_a_full_disk_leaves_the_old_manifest_and_no_more(fake_worker: FakeWorker, tmp_path: Path) -> None:
    make.build(VARIANTS[:1], tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(1000), pytest.raises(OSError, match="File too large"):
        make.build(VARIANTS, tmp_path)
    after = {path.name for path in tmp_path.iterdir()}
    assert after - before.keys() <= {f"{v.name}.{suffix}" for v in VARIANTS for suffix in ("cubin", "ptx.gz")}
    assert (tmp_path / "manifest.json").read_bytes() == before["manifest.json"] and verify(tmp_path) == []
    assert make.build(VARIANTS, tmp_path).num_kept == 1


def test_in_this_process(fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make.concurrent.futures, "ProcessPoolExecutor", None)
    fake_worker.bad = {VARIANTS[1].name}
    report = make.build(VARIANTS, tmp_path, jobs=0)
    assert (report.num_built, [failure.name for failure in report.failures]) == (2, [VARIANTS[1].name])


def test_a_batch_has_one_target_and_every_process_gets_one() -> None:
    variants = catalogue(["sm_90a", "sm_100f"])
    batches = make._batches(variants, jobs=4)
    assert [v for batch in batches for v in batch] == variants
    assert all(len({v.target for v in batch}) == 1 and len(batch) <= make.BATCH for batch in batches)
    assert len(make._batches(variants[:4], jobs=4)) == 4


def test_manifest_round_trip(tmp_path: Path) -> None:
    entry = fake_entry(VARIANTS[0], tmp_path, "source")
    write_manifest(tmp_path, [entry], "1.2.3")
    assert Manifest.load(tmp_path).entries == {entry.name: entry}
    assert entry.recipe.params == (Leaf("tma:0", 0, 128), Leaf("size:m", 128, 4), Leaf("ptr:2", 136, 8))
    assert entry.recipe.tensor_maps == (TensorMap(0, "bf16", (64, 128, 1), 128, 16),)
    assert entry.recipe.buffers == buffers(VARIANT)
    assert re.fullmatch(r"\d+\.\d+\.\d+", entry.ptxas)
    assert entry.sass["UTMALDG"] == 2 and entry.sass["UTMALDG.MULTICAST"] == 1


def test_the_command_reports_refusals_by_name(
    fake_worker: FakeWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jax_bwgemm.__main__ import main

    name = catalogue(["sm_90a"])[0].name
    fake_worker.bad = {name}
    assert main(["build", "--arch", "sm_90a", "--only", name, "--out", str(tmp_path)]) == 1
    assert f"refused {name}: no" in capsys.readouterr().err
    assert json.loads((tmp_path / "manifest.json").read_text())["variants"] == []
