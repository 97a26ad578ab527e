"""`doctor` where our kernels run."""

from __future__ import annotations

import json
import subprocess
import sys

from jax_bwgemm.cli.doctor_trials import RESULTS
from jax_bwgemm.facts.arch import Arch


def test_doctor_multiplies_here(arch: Arch) -> None:
    done = subprocess.run([sys.executable, "-m", "jax_bwgemm", "doctor", "--json"], capture_output=True, text=True)
    said = json.loads(done.stdout)
    states = {finding["what"]: finding["state"] for finding in said["findings"]}
    assert done.returncode == 0 and said["ok"], done.stdout
    expected = {f"product {dtype}": "ok" for dtype in RESULTS}
    if arch.int8_ops_per_clk == 0:
        expected |= {"product int8": "warning", "product uint8": "warning"}
    assert expected | {"command buffer": "ok", "runs": "ok"} == {
        what: state for what, state in states.items() if what in expected or what in ("command buffer", "runs")
    }
