"""`emulate=` where PTX or the library is missing, damaged, or wrong: what the caller of a JAX function is told."""

from __future__ import annotations

import functools
import gzip
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_bwgemm
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime import ffi
from jax_bwgemm.runtime.config import FallbackError
from tests.emu.shipped import copy_alone, rewrite_ptx, why_any_missing

WHY_NOT = ffi.status() or why_any_missing("sm_100f")
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.usefixtures("large_products"),
]
PAIR = "256x256x64_cta2_cluster2x1"
PAIR_VARIANT = Variant("sm_100f", "bfloat16", "bfloat16", "bfloat16", "k", "n", Tile.from_str(PAIR))
OPERANDS = np.ones((16, 64), jnp.bfloat16), np.ones((64, 64), jnp.bfloat16)

matmul = functools.partial(jax_bwgemm.matmul, emulate="sm_100f", on_fallback="error")


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """What was compiled before does not look for files again."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def own_artifacts(compiles_anew: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory with one kernel, a pair's; returns its PTX."""
    ptx = copy_alone(PAIR_VARIANT, tmp_path)
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    return ptx


def test_missing_ptx_falls_back(own_artifacts: pathlib.Path) -> None:
    own_artifacts.unlink()
    with pytest.raises(FallbackError, match="ptx.gz is in the manifest but missing; run `python"):
        matmul(*OPERANDS, tile=PAIR)


def test_missing_library_falls_back(
    compiles_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("JAX_BWGEMM_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(FallbackError, match="requires libjax_bwgemm_ffi.so, got none at"):
        matmul(*OPERANDS)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"no ptx"), gzip.compress(b"\xff"), gzip.compress(b"ptx " * 99)[:12] + b"\xff" * 20],
    ids=["gzip", "ptx", "text", "stream"],
)
def test_damaged_ptx_is_named(own_artifacts: pathlib.Path, content: bytes) -> None:
    """Damaged, the next directory is asked and then XLA; built like that, it is a fault of the build."""
    own_artifacts.write_bytes(content)
    with pytest.raises(FallbackError, match=r"ptx.gz requires sha256 \w+, got \w+; run `python"):
        matmul(*OPERANDS, tile=PAIR)
    rewrite_ptx(own_artifacts, content)
    with pytest.raises(ValueError, match="ptx.gz requires PTX that the emulator can read, got .*; run `python"):
        matmul(*OPERANDS)


def test_a_broken_kernel_is_reported_through_jit(own_artifacts: pathlib.Path) -> None:
    """The emulator's report reaches the caller of a compiled function."""
    text = gzip.decompress(own_artifacts.read_bytes()).decode()
    rewrite_ptx(own_artifacts, gzip.compress(text.replace("fence.proxy.async", "// fence.proxy.async").encode()))
    with pytest.raises(Exception, match=r"(?s)missing-proxy-fence.*CTA \d+ warp \d+, PTX line \d+"):
        jax.jit(matmul)(*OPERANDS).block_until_ready()
