"""The library's SHA-256 against hashlib's."""

import hashlib
import random

import pytest

from jax_bwgemm.runtime import ffi

pytestmark = pytest.mark.skipif(ffi.status() is not None, reason=str(ffi.status()))


@pytest.mark.parametrize("size", [*range(130), 1000, 2**16, 2**20 + 7])  # a block is 64 bytes, its length 8 of them
def test_sha256_is_hashlibs(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert ffi.sha256(data) == hashlib.sha256(data).hexdigest()
