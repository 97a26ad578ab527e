"""The manifest: what is written is read, and what cannot be used says why and what to do."""

from __future__ import annotations

import json
import os
import pathlib
import random

import pytest
from fake_artifacts import fake_entry, fake_repack, write_fake_artifacts
from mutants import mutant
from privileges import forbidden

from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import artifacts, manifest
from jax_bwgemm.runtime.artifacts import Entry, Manifest, ManifestError, RepackEntry
from tests.cases import fused
from tests.fuzz import SEED, fuzz, rounds

THREADS = Variant("sm_100a", "int8", "uint8", "int32", "k", "k", Tile(128, 128, 128), c_major="m", store="threads")
RESIDUAL = Variant(
    "sm_100f", "float32", "float32", "float32", "k", "n", Tile(128, 128, 32), fused("bias_relu_residual")
)
VARIANT = Variant(
    "sm_90a", "bfloat16", "bfloat16", "float32", "k", "n", Tile(128, 256, cluster_m=2), fused("scale_bias")
)
ALL = (VARIANT, THREADS, RESIDUAL)
REPACK = Repack("sm_90a", "transpose", 1)


def variant(fields, name=VARIANT.name):
    return next(fields for fields in fields["variants"] if fields["name"] == name)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    write_fake_artifacts(tmp_path, [*map(fake_entry, ALL), fake_repack(REPACK)])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    return tmp_path


def edit(directory: pathlib.Path, change) -> None:
    path = directory / artifacts.MANIFEST_NAME
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))


def edit_recipe(part, old, new):
    def change(fields):
        texts = variant(fields)["recipe"]
        assert old in texts[part]
        texts[part] = texts[part].replace(old, new)

    return change


def test_round_trip(directory):
    manifest = Manifest.load(directory)
    assert manifest.entries == {v.name: fake_entry(v) for v in ALL}
    assert manifest.cutlass_dsl == "0.0.0"
    for entry in map(fake_entry, ALL):
        assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    repack = fake_repack(REPACK)
    assert manifest.repacks == {REPACK.name: repack} and set(manifest.kernels) == {v.name for v in (*ALL, REPACK)}
    assert RepackEntry.from_json(json.loads(json.dumps(repack.to_json()))) == repack


def test_texts_of_a_recipe():
    """Each buffer has its own map where TMA moves it; threads store to any address that elements may have."""
    texts = [fake_entry(v).recipe.texts() for v in ALL]
    assert [text["buffers"] for text in texts] == [
        "a:bfloat16[l?,m,k+]%16 b:bfloat16[l?,k,n+]%16 bias:float32[n]%16 -> out:float32[l,m,n]%16",
        "a:int8[l?,m,k+]%16 b:uint8[l?,n,k+]%16 -> out:int32[l,n,m]%4",
        "a:float32[l?,m,k+]%16 b:float32[l?,k,n+]%16 bias:float32[n]%16 residual:float32[l,m,n]%16 -> "
        "out:float32[l,m,n]%16",
    ]
    assert [text["tensor_maps"] for text in texts] == [
        "0:bf16[64,128,1]/128/16 1:bf16[64,32,1]/128/16 3:f32[32,64,1]/128/16",
        "0:u8[128,128,1]/128/16 1:u8[128,128,1]/128/16",
        "0:tf32[32,128,1]/128/16 1:tf32[32,32,1]/128/32 3:f32[16,128,1]/64/16 4:f32[16,128,1]/64/16",
    ]
    sizes = "size:m@{}+4 size:n@{}+4 size:k@{}+4 size:batch@{}+4"
    assert texts[0]["params"] == f"tma:0@0+128 tma:1@128+128 tma:3@256+128 ptr:2@384+8 {sizes}".format(
        392, 396, 400, 404
    )
    assert texts[1]["params"].startswith("tma:0@0+128 tma:1@128+128 ptr:2@256+8 size:m@264+4 ")


def test_written_atomically_and_sorted(tmp_path):
    other = fake_entry(Variant("sm_100f", "float16", "float16", "float16", "m", "k", Tile(128, 128)))
    first = artifacts.write_manifest(tmp_path, [fake_entry(VARIANT), other]).read_text()
    assert artifacts.write_manifest(tmp_path, [other, fake_entry(VARIANT)]).read_text() == first
    assert [path.name for path in tmp_path.iterdir()] == [artifacts.MANIFEST_NAME]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: f.update(format=99), r"requires format 8, got 99; run `python -m jax_bwgemm build`"),
        (lambda f: f.update(package_version="9.9"), r"requires package_version '0.1.0', got '9.9'; run"),
        (lambda f: f.pop("cutlass_dsl"), r"requires the key 'cutlass_dsl', got none"),
        (lambda f: f.update(extra=1), r"requires no key 'extra', got one"),
        (lambda f: variant(f).pop("smem_bytes"), r"variant sm_90a_\S+ requires the key 'smem_bytes'"),
        (lambda f: variant(f).update(colour=1), r"variant sm_90a_\S+ requires no key 'colour'"),
        (lambda f: variant(f)["tile"].pop("k_tile"), r"Tile requires the key 'k_tile'"),
        (lambda f: variant(f)["recipe"].pop("params"), r"variant sm_90a_\S+, `recipe` requires the key 'params'"),
        (lambda f: variant(f)["recipe"].update(colour="1"), r"`recipe` requires no key 'colour'"),
        (edit_recipe("tensor_maps", " 3:f32", " 2:f32"), r"requires those of buffers \[0, 1, 3\], got \[0, 1, 2\]"),
        (edit_recipe("params", "tma:3", "tma:5"), r"`params` requires buffers of 0..3, got 5"),
        (edit_recipe("params", "tma:3", "ptr:3"), r"requires those of buffers \[0, 1\], got \[0, 1, 3\]"),
        (edit_recipe("params", "size:m@", "size:m%"), r"a recipe requires texts of the form \S+, got 'size:m%392\+4'"),
        (
            edit_recipe("params", "size:m", "q:m"),
            r"source requires one of tma, tma2, ptr, size, step, int, .*, got 'q:m'",
        ),
        (
            edit_recipe("tensor_maps", "/16", ""),
            r"a recipe requires texts of the form \S+, got '0:bf16\[64,128,1\]/128'",
        ),
        (
            edit_recipe("buffers", "l?", "l!"),
            r"a recipe requires texts of the form \S+, got 'a:bfloat16\[l!,m,k\+\]%16'",
        ),
        (lambda f: variant(f).pop("store"), r"variant sm_90a_\S+ requires the key 'store'"),
        (lambda f: variant(f).update(c_major="m"), r"its fields require the name sm_90a_bf16_bf16_f32_knm_"),
        (lambda f: variant(f).update(a_major="m"), r"its fields require the name sm_90a_bf16_bf16_f32_mnn_"),
        (lambda f: f.pop("repacks"), r"requires the key 'repacks', got none"),
        (lambda f: f["repacks"][0].pop("kind"), r"repack sm_90a_transpose_8bit requires the key 'kind'"),
        (lambda f: f["repacks"][0].update(tile={}), r"repack sm_90a_transpose_8bit requires no key 'tile'"),
        (lambda f: f["repacks"][0].update(kind="pad"), r"its fields require the name sm_90a_pad_8bit"),
    ],
)
def test_refused(directory, change, message):
    edit(directory, change)
    with pytest.raises(ManifestError, match=message):
        Manifest.load(directory)
    refused = [x for x in (VARIANT, THREADS, REPACK) if isinstance(artifacts.find(x), str)]
    assert refused in ([VARIANT], [REPACK], [VARIANT, THREADS, REPACK])  # one damaged entry costs that kernel alone
    assert all("require" in artifacts.find(x) for x in refused)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_no_json_object(directory, text):
    (directory / artifacts.MANIFEST_NAME).write_text(text)
    with pytest.raises(ManifestError, match="run `python -m jax_bwgemm build`"):
        Manifest.load(directory)


def test_no_manifest(no_artifacts):
    assert artifacts.find(VARIANT).startswith(
        f"no cubins: {no_artifacts}/manifest.json cannot be read: No such file or dir"
    )


def test_find(directory):
    assert artifacts.find(VARIANT) == fake_entry(VARIANT)
    assert artifacts.find(REPACK) == fake_repack(REPACK)
    other = Repack("sm_100f", "pad", 2)
    assert artifacts.find(other) == f"no cubin {other.name} in {directory}"
    absent = Variant("sm_90a", "float16", "float16", "float32", "k", "n", Tile(128, 256))
    assert artifacts.find(absent) == f"no cubin {absent.name} in {directory}"  # who asked knows what would bring it


def test_find_ptx(directory):
    path = directory / f"{VARIANT.name}.ptx.gz"
    said = f"{path} is in the manifest but missing; run `python -m jax_bwgemm build`"
    assert artifacts.find_ptx(VARIANT) == f"{said}, or correct or unset JAX_BWGEMM_ARTIFACTS"
    path.write_bytes(b"")
    assert artifacts.find_ptx(VARIANT) == path


def test_find_sees_a_new_build(directory):
    assert isinstance(artifacts.find(VARIANT), Entry)
    edit(directory, lambda f: f["variants"].clear())
    assert "no cubin" in artifacts.find(VARIANT)


def test_find_misses_the_file(directory):
    (directory / f"{VARIANT.name}.cubin").unlink()
    assert "in the manifest but missing" in artifacts.find(VARIANT)


def test_directories_in_order(directory, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", f"{empty}{os.pathsep}{directory}")
    assert artifacts.artifact_dirs() == (empty, directory)
    assert isinstance(artifacts.find(VARIANT), Entry)


def test_an_added_directory_comes_last(directory, no_added, tmp_path_factory, monkeypatch):
    added, late = tmp_path_factory.mktemp("added"), Variant("sm_90a", *["float16"] * 3, "k", "n", Tile(128, 256))
    write_fake_artifacts(added, [fake_entry(late), fake_entry(VARIANT)])
    assert "no cubin" in artifacts.find(late)
    for _ in range(2):
        artifacts.add_dir(str(added))
    assert artifacts.artifact_dirs() == (directory, added)
    assert artifacts.find(late) == fake_entry(late)
    assert artifacts.find_ptx(VARIANT).count("is in the manifest but missing") == 2
    (added / f"{VARIANT.name}.ptx.gz").touch()
    assert artifacts.find_ptx(VARIANT) == added / f"{VARIANT.name}.ptx.gz"  # the first that has it
    monkeypatch.delenv("JAX_BWGEMM_ARTIFACTS")
    assert artifacts.artifact_dirs()[-1] == added


@pytest.fixture
def no_added(monkeypatch):
    monkeypatch.setattr(artifacts, "_added", [])


def test_default_directory(monkeypatch):
    monkeypatch.delenv("JAX_BWGEMM_ARTIFACTS", raising=False)
    assert all(directory.name == "_artifacts" for directory in artifacts.artifact_dirs())


def test_verify(directory):
    assert artifacts.verify(directory) == []
    path = directory / f"{VARIANT.name}.cubin"
    path.write_bytes(b"something else")
    assert "requires sha256" in artifacts.verify(directory)[0]
    path.unlink()
    assert "missing" in artifacts.verify(directory)[0]
    (directory / f"{REPACK.name}.cubin").unlink()
    assert len(artifacts.verify(directory)) == 2


NAME = VARIANT.name


@fuzz
def test_no_damage_of_a_manifest_is_a_crash(directory):
    """What is read of a damaged one has the types of what was written, and can be written again."""
    path, rng, refused = directory / artifacts.MANIFEST_NAME, random.Random(SEED), 0
    content = path.read_bytes()
    for i in range(rounds(2000)):
        path.write_bytes(mutant(content, rng))
        os.utime(path, ns=(i, i))
        try:
            manifest = Manifest.load(directory)
        except ManifestError as error:
            refused += 1
            assert str(path) in str(error) or "variant " in str(error) or "repack " in str(error)
            assert artifacts.REMEDY in str(error)
            found = [artifacts.find(x) for x in (*ALL, REPACK)]
            assert all(artifacts.REMEDY in x or x.startswith("no cubin ") for x in found if isinstance(x, str))
            continue
        for entry in manifest.kernels.values():
            assert type(entry).from_json(json.loads(json.dumps(entry.to_json()))) == entry
            assert {type(x) for x in (entry.num_threads, entry.smem_bytes, *entry.sass.values())} <= {int}
        assert isinstance(artifacts.find(VARIANT), (Entry, str))
        assert all("/" not in name for name in artifacts.listed(directory))
    assert refused > rounds(1000)


def test_a_manifest_in_depth(directory):
    edit(directory, lambda f: variant(f).update(epilogue="relu(" * 5000 + "acc" + ")" * 5000))
    with pytest.raises(ManifestError, match="run `python -m jax_bwgemm build`"):
        Manifest.load(directory)
    (directory / artifacts.MANIFEST_NAME).write_text("[" * 200_000)
    with pytest.raises(ManifestError, match="requires JSON, got maximum recursion depth exceeded"):
        Manifest.load(directory)


def test_a_manifest_may_not_be_huge(directory):
    with (directory / artifacts.MANIFEST_NAME).open("r+b") as file:
        file.truncate(manifest.MOST_MANIFEST_BYTES + 1)
    assert "requires at most 67108864 bytes, got more" in artifacts.find(VARIANT)


@pytest.fixture
def second(directory, tmp_path_factory, monkeypatch):
    """A directory behind the first, with the same kernels; all have PTX."""
    second = tmp_path_factory.mktemp("second")
    write_fake_artifacts(second, [*map(fake_entry, ALL), fake_repack(REPACK)])
    for path in (*directory.glob("*.cubin"), *second.glob("*.cubin")):
        path.with_suffix(f".{artifacts.PTX}").touch()
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", f"{directory}{os.pathsep}{second}")
    return second


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "endless": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "huge": lambda path: os.truncate(path, artifacts.MOST_KERNEL_BYTES + 1),
    "damaged": lambda path: path.write_bytes(b"damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("file", [f"{NAME}.cubin", artifacts.MANIFEST_NAME])
def test_the_next_directory_is_tried(file, damage, directory, second, monkeypatch):
    damage(directory / file)
    assert artifacts.find(VARIANT) == fake_entry(VARIANT)
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(directory))
    reason = artifacts.find(VARIANT)
    assert isinstance(reason, str) and str(directory / file) in reason and artifacts.REMEDY in reason


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_so_it_is_for_ptx(damage, directory, second):
    damage(directory / f"{NAME}.{artifacts.PTX}")
    assert artifacts.find(VARIANT, artifacts.PTX) == fake_entry(VARIANT)
    assert artifacts.find_ptx(VARIANT) == second / f"{NAME}.{artifacts.PTX}"


def test_a_directory_that_nobody_may_enter_is_a_reason(directory, second):
    with forbidden(directory):
        for suffix in (artifacts.CUBIN, artifacts.PTX):
            assert "manifest.json cannot be read: Permission denied" in artifacts.find_in(directory, VARIANT, suffix)
            assert "Permission denied" in artifacts.find(VARIANT, suffix)
        assert "Permission denied" in artifacts.find_ptx(VARIANT)
        assert len(artifacts.state()) == 2 and artifacts.sha256_of(NAME) is None
        with pytest.raises(ManifestError, match="Permission denied"):
            artifacts.verify(directory)


def test_what_a_manifest_lists_is_known_whatever_its_version(directory):
    names = {v.name for v in (*ALL, REPACK)}
    assert artifacts.listed(directory) == names
    edit(directory, lambda f: f.update(format=1, package_version="0.0.1", more=3))
    edit(directory, lambda f: f["variants"].append({"name": "sm_90a_old"}))
    assert artifacts.listed(directory) == names | {"sm_90a_old"}
    edit(directory, lambda f: f["variants"].append({"name": "../sm_90a_other"}))
    assert artifacts.listed(directory) == names | {"sm_90a_old"}  # none that leads elsewhere
    for text in ("", "3", '{"variants": 3}', '{"variants": [3]}', '{"variants": [{}]}', '{"variants": [{"name": 3}]}'):
        (directory / artifacts.MANIFEST_NAME).write_text(text)
        assert artifacts.listed(directory) == set()
