"""The driver's declarations of our own, against NVIDIA's cuda.h of the package nvidia-cuda-runtime."""

import importlib.util
import pathlib
import shutil
import subprocess

import pytest

SOURCE = pathlib.Path(__file__).parent / "fake_cuda" / "check_decls.cc"


def _cuda_include_dirs() -> list[pathlib.Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    found = [root / name / "include" for root in roots for name in ("cu13", "cuda_runtime")]
    return [directory for directory in found if (directory / "cuda.h").is_file()]


@pytest.mark.skipif(not _cuda_include_dirs(), reason="needs cuda.h: pip install nvidia-cuda-runtime")
def test_declarations_agree_with_cuda_h() -> None:
    compiler = shutil.which("c++")
    assert compiler, "a C++ compiler is needed"
    for include in _cuda_include_dirs():
        command = [compiler, "-std=c++17", "-fsyntax-only", "-isystem", str(include), str(SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
