"""`make test` has all that tests need: what is skipped there is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.completeness import SWITCH

ROOT = Path(__file__).parents[2]
TESTS = {
    "one": 'import pytest\n\ndef test_it():\n    pytest.skip("needs a compiler")\n',
    "marked": 'import pytest\n\n@pytest.mark.skipif(True, reason="no kernels")\ndef test_it():\n    pass\n',
    "module": 'import pytest\n\npytest.importorskip("no_such_package")\n',
    "excused": 'import pytest\n\ndef test_it():\n    pytest.skip("needs the thread sanitizer")\n',
    "expected": "import pytest\n\n@pytest.mark.xfail\ndef test_it():\n    raise ValueError\n",
}


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("name", TESTS)
def test_a_skip_fails(name: str, is_complete: bool, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS[name])
    environment = {key: value for key, value in os.environ.items() if key != SWITCH} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.completeness", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        env=environment | ({SWITCH: "1"} if is_complete else {}),
        capture_output=True,
        text=True,
    )
    fails = is_complete and name not in ("excused", "expected")
    assert ("requires all that tests need, got a skip" in done.stdout) is fails, done.stdout
    assert (done.returncode in (1, 2)) is fails, done.stdout
