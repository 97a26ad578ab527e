"""Compile on demand: when, where to, what is remembered; with a stand-in for the build, and once for real."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import pwd
import re
import shlex
import stat
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fake_artifacts import fake_entry, write_fake_artifacts
from privileges import forbidden

import jax_bwgemm
from jax_bwgemm.facts.arch import by_name
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime import artifacts, decision, jit_build
from jax_bwgemm.runtime.artifacts import COMPILER, Manifest, verify
from jax_bwgemm.runtime.attempts import choose
from jax_bwgemm.runtime.rungs import Asked

VARIANT = Variant("sm_90a", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile(128, 128))
PROBLEM = Problem(512, 1024, 256)
ROOT = Path(__file__).parents[2]
HAS_DSL = importlib.util.find_spec("cutlass") is not None


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """A cache directory and a memory that no other test sees; a stand-in for the compiler's presence."""
    monkeypatch.setattr(jit_build, "_results", {})
    monkeypatch.setattr(artifacts, "_added", [])
    monkeypatch.setattr(jit_build, "cache_dir", lambda variant: tmp_path / "cache")
    monkeypatch.setenv("JAX_BWGEMM_COMPILE_MISSING", "auto")


class FakeBuilder:
    """Writes cubins that hold nothing but their names; `reason` is why it does not."""

    def __init__(self, reason=None):
        self.reason, self.variants = reason, []

    def __call__(self, variant, directory):
        self.variants.append(variant)
        if self.reason is None:
            directory.mkdir(exist_ok=True)
            write_fake_artifacts(directory, [fake_entry(known) for known in self.variants])
            (directory / f"{variant.name}.ptx.gz").touch()
        return self.reason


@pytest.fixture
def builder(monkeypatch):
    fake = FakeBuilder()
    monkeypatch.setattr(jit_build, "build_in_a_process", fake)
    return fake


def lower(f, *shapes):
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(lambda *args: f(*args)).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    return re.findall(r'variant = "([^"]*)"', text)


def matmul(a, b, **kwargs):
    return jax_bwgemm.matmul(a, b, **{"device": "h200", "on_fallback": "error"} | kwargs)


def test_builds_once(no_artifacts, tmp_path):
    fake = FakeBuilder()
    assert tmp_path / "cache" not in artifacts.artifact_dirs()
    first, second = (jit_build.build(VARIANT, fake) for _ in range(2))
    assert first == second == fake_entry(VARIANT) == artifacts.find(VARIANT)
    assert fake.variants == [VARIANT]
    assert artifacts.artifact_dirs().count(tmp_path / "cache") == 1


def test_what_another_process_built_is_found(tmp_path):
    FakeBuilder()(VARIANT, tmp_path / "cache")
    fake = FakeBuilder("not needed")
    assert jit_build.build(VARIANT, fake) == fake_entry(VARIANT)
    assert fake.variants == []


def test_damaged_cubin_is_built_again(tmp_path):
    FakeBuilder()(VARIANT, tmp_path / "cache")
    (tmp_path / "cache" / f"{VARIANT.name}.cubin").write_bytes(b"damaged")
    fake = FakeBuilder()
    assert jit_build.build(VARIANT, fake) == fake_entry(VARIANT)
    assert fake.variants == [VARIANT]


def test_a_builder_that_leaves_nothing_is_named(tmp_path):
    reason = jit_build.build(VARIANT, lambda variant, directory: None)
    assert isinstance(reason, str) and "no cubins: " in reason


def test_a_refusal_is_remembered():
    fake = FakeBuilder("it spills")
    reasons = {jit_build.build(VARIANT, fake) for _ in range(3)}
    assert reasons == {f"compiling {VARIANT.name} failed: it spills"}
    assert fake.variants == [VARIANT] and artifacts._added == []


def test_threads_wait_for_one_build():
    fake = FakeBuilder()
    threads = [threading.Thread(target=jit_build.build, args=(VARIANT, fake)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.variants == [VARIANT]


def test_what_was_compiled_is_at_hand(builder, no_artifacts):
    """Where cubins, PTX and the handler's directories are asked for, not only here."""
    assert decision.decide(PROBLEM, "h200", None).entry is None
    variant = choose(Asked(PROBLEM, "h200", compiles=True)).entry.variant
    assert decision.decide(PROBLEM, "h200", None).entry == fake_entry(variant) and builder.variants == [variant]


def test_for_the_emulator_too(builder, no_artifacts, monkeypatch):
    monkeypatch.setattr(decision.ffi, "status", lambda: None)
    found = choose(Asked(PROBLEM, "b200", is_emulated=True, compiles=True))
    assert builder.variants == [found.entry.variant] and found.entry.variant.target == "sm_100f"
    assert artifacts.find_ptx(found.entry.variant).exists()


def test_an_epilogue_is_compiled_before_xla_gets_it(builder, no_artifacts):
    (name,) = kernels(
        lower(lambda a, b, r: matmul(a, b, device="b200", residual=r), (512, 256), (256, 512), (512, 512))
    )
    assert [name] == [variant.name for variant in builder.variants] and name.endswith("_residual")


def test_a_product_is_compiled_where_its_epilogue_cannot_be(builder, no_artifacts):
    """TMA cannot step over the residual's rows."""
    (name,) = kernels(lower(lambda a, b, r: matmul(a, b.mT, residual=r), (512, 256), (509, 256), (512, 509)))
    assert [name] == [variant.name for variant in builder.variants]
    assert "_bf16_bf16_f32_" in name and name.endswith("_identity_threads")


def test_users_tile_is_compiled(builder, no_artifacts):
    text = lower(lambda a, b: matmul(a, b, tile="128x192x64_cta1_cluster1x1"), (512, 256), (256, 1024))
    (variant,) = builder.variants
    assert variant.tile == Tile(128, 192) and f'"{variant.name}"' in text


def test_without_any_kernel_the_planners_own_choice_is_compiled(builder, no_artifacts):
    text = lower(matmul, (512, 256), (256, 1024))
    (variant,) = builder.variants
    assert variant == plan(PROBLEM, by_name("h200")).variant and f'"{variant.name}"' in text
    lower(matmul, (512, 256), (256, 1024))
    assert len(builder.variants) == 1


def test_a_kernel_at_hand_is_not_passed_over(builder, tmp_path, monkeypatch):
    """Neither for a better tile nor for a better major: compiling is for products that nothing can do."""
    only = fake_entry(dataclasses.replace(VARIANT, tile=Tile(64, 128), b_major="k"))
    (tmp_path / "one").mkdir()
    write_fake_artifacts(tmp_path / "one", [only])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path / "one"))
    dims = (((1,), (1,)), ((), ()))
    f = functools.partial(jax_bwgemm.dot_general, dimension_numbers=dims, device="h200", on_fallback="error")
    for text in (
        lower(f, (512, 256), (1024, 256)),
        lower(lambda a, b: f(a, b.T), (512, 256), (256, 1024)),  # taken from before the transpose, b would be n-major
    ):
        assert builder.variants == [] and f'"{only.name}"' in text


def test_never(builder, no_artifacts):
    no_cubins = pytest.raises(jax_bwgemm.FallbackError, match="no cubins: .* run `python -m jax_bwgemm build`")
    with jax_bwgemm.config(compile_missing="never"), no_cubins:
        lower(matmul, (512, 256), (256, 1024))
    assert builder.variants == []


def test_a_refusal_falls_back_and_says_so(builder, no_artifacts):
    builder.reason = "no space left on device"
    for _ in range(2):
        with pytest.raises(
            jax_bwgemm.FallbackError, match="no cubins: .*; compiling .* failed: no space left on device"
        ):
            lower(matmul, (512, 256), (256, 1024))
    assert len(builder.variants) == 1


def test_illegal_tiles_and_products_are_not_compiled(builder, no_artifacts):
    with pytest.raises(ValueError, match="cannot compute .* on h200: `cta_group` requires 1"):
        lower(lambda a, b: matmul(a, b, tile="256x256x64_cta2_cluster2x1"), (512, 256), (256, 1024))
    lower(lambda a, b: matmul(a, b, on_fallback="ignore"), (0, 256), (256, 1024))
    int8 = jax.ShapeDtypeStruct((65, 65), jnp.int8)
    with pytest.raises(jax_bwgemm.FallbackError, match="requires a k-major b for int8"):
        jax.jit(functools.partial(matmul, out_dtype=jnp.int32)).trace(int8, int8).lower(lowering_platforms=("cuda",))
    assert builder.variants == []


def test_the_handler_is_told_of_the_cache(builder, no_artifacts, tmp_path, monkeypatch):
    registered = []
    device = type("H200", (), {"device_kind": "NVIDIA H200", "compute_capability": "9.0", "core_count": 132})
    monkeypatch.setattr(decision, "_cuda_devices", lambda: [device])
    monkeypatch.setattr(decision.ffi, "status", lambda: None)
    monkeypatch.setattr(decision.ffi, "register", registered.append)
    assert choose(Asked(PROBLEM, None, compiles=True)).entry is not None
    decision.register(is_emulated=False)
    assert registered == [(no_artifacts, tmp_path / "cache")]


def test_a_damaged_cubin_is_a_reason_of_xlas(builder, no_artifacts):
    """Aloud, where nothing may be compiled; the handler would refuse it when the program runs."""
    variant = plan(PROBLEM, by_name("h200")).variant
    write_fake_artifacts(no_artifacts, [fake_entry(variant)])
    assert kernels(lower(matmul, (512, 256), (256, 1024))) == [variant.name]
    (no_artifacts / f"{variant.name}.cubin").write_bytes(b"damaged")
    (no_artifacts / "new").touch()  # the directory has changed: what was decided is asked again
    with (
        jax_bwgemm.config(compile_missing="never"),
        pytest.raises(jax_bwgemm.FallbackError, match="XLA computes .*"),
    ):
        lower(matmul, (512, 256), (256, 1024))
    assert "cubin requires sha256" in artifacts.find(variant)


def test_no_library_no_compiling(builder, no_artifacts, monkeypatch):
    device = type("H200", (), {"device_kind": "NVIDIA H200", "compute_capability": "9.0", "core_count": 132})
    monkeypatch.setattr(decision, "_cuda_devices", lambda: [device])
    monkeypatch.setattr(decision.ffi, "status", lambda: "the library is missing")
    assert choose(Asked(PROBLEM, None, compiles=True)).entry is None
    assert builder.variants == []


@pytest.fixture
def real_cache_dir(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit_build, "_results", {})
    monkeypatch.setattr(artifacts, "_added", [])
    return tmp_path


def test_without_the_compiler_there_is_a_remedy(real_cache_dir, monkeypatch):
    monkeypatch.setattr(jit_build.importlib.util, "find_spec", lambda name: None)
    reason = jit_build.build(VARIANT)
    assert reason == f"compiling it requires CuTeDSL, got none; pip install {COMPILER} to have missing kernels compiled"


@pytest.mark.skipif(not HAS_DSL, reason="needs CuTeDSL")
def test_the_cache_is_named_after_version_and_sources(real_cache_dir):
    from jax_bwgemm.kernels.aot.sources import source_sha256

    name = f"{jax_bwgemm.__version__}-{source_sha256(VARIANT)[:16]}"
    assert jit_build.cache_dir(VARIANT) == real_cache_dir / "jax_bwgemm" / name
    other = dataclasses.replace(VARIANT, target="sm_100f")
    assert jit_build.cache_dir(other) == real_cache_dir / "jax_bwgemm" / name.replace(
        source_sha256(VARIANT)[:16], source_sha256(other)[:16]
    )
    assert jit_build.cache_dir(other) != jit_build.cache_dir(VARIANT)


@pytest.mark.skipif(not HAS_DSL, reason="needs CuTeDSL")
def test_the_cache_is_the_users_alone_or_not_used(real_cache_dir, monkeypatch):
    directory = jit_build.cache_dir(VARIANT)
    assert [stat.S_IMODE(x.stat().st_mode) for x in (directory, directory.parent)] == [0o700] * 2
    directory.parent.chmod(0o777)
    fake = FakeBuilder()
    assert "requires a directory of user" in jit_build.build(VARIANT, fake) and fake.variants == []


@pytest.mark.skipif(not HAS_DSL, reason="needs CuTeDSL")
def test_without_a_cache_there_is_a_reason(real_cache_dir, monkeypatch):
    fake = FakeBuilder()
    with forbidden(real_cache_dir):
        assert jit_build.build(VARIANT, fake).endswith("cannot be made: Permission denied")

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(jit_build, "_results", {})
    assert jit_build.build(VARIANT, fake).startswith("a cache requires a home directory, got none: set XDG_CACHE_HOME")
    assert fake.variants == []


def test_no_working_directory_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert "No such file or directory" in jit_build.build_in_a_process(VARIANT, tmp_path)


def test_a_process_that_fails_is_quoted(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert "NotADirectoryError" in jit_build.build_in_a_process(VARIANT, tmp_path / "file" / "cache")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    assert "no-python" in jit_build.build_in_a_process(VARIANT, tmp_path)


@pytest.mark.long
@pytest.mark.skipif(not HAS_DSL, reason="needs CuTeDSL")
def test_two_processes_at_once_build_for_real(real_cache_dir):
    """Each its own variant, into one directory: both are in the manifest, and whole."""
    directory = jit_build.cache_dir(VARIANT)
    variants = [VARIANT, dataclasses.replace(VARIANT, b_major="k")]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        reasons = list(pool.map(lambda variant: jit_build.build_in_a_process(variant, directory), variants))
    assert reasons == [None, None]
    assert set(Manifest.load(directory).entries) == {variant.name for variant in variants}
    assert verify(directory) == []
    assert jit_build.build(VARIANT, FakeBuilder("not needed")).name == VARIANT.name


@pytest.mark.skipif(not HAS_DSL, reason="needs CuTeDSL")
def test_the_compiler_is_not_imported_here():
    script = (
        "import sys; from jax_bwgemm.runtime import jit_build; from jax_bwgemm.facts.resources import Tile; "
        "from jax_bwgemm.facts.variant import Variant; "
        "from jax_bwgemm.facts.epilogue import Input; "
        f"jit_build.cache_dir({VARIANT!r}); sys.exit('cutlass' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_remedy_names_what_an_index_has():
    """Our own package may come as a file: its extra `build` would be looked for in vain."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(shlex.split(COMPILER)) == set(extras["build"]) - {"rich"}  # which draws
