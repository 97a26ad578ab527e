"""Relative error against float64 on the same inputs. Knows no clock."""

from __future__ import annotations

import numpy as np

from jax_bwgemm.bench.cases import Case

NUM_ROWS = 64  # of the result; float64 of all 8192x8192x8192 would take minutes, and rows are alike


def reference_rows(case: Case, a: np.ndarray, b: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(row indices, those rows of the product in float64); of the last matrix of a batch."""
    a, b = (x[-1] if case.batch > 1 else x for x in (a, b))
    a, b = a.T if case.form[0] == "t" else a, b.T if case.form[1] == "t" else b
    rows = np.random.default_rng(seed).permutation(case.m)[:NUM_ROWS]
    return rows, a[rows].astype(np.float64) @ b.astype(np.float64)


def relative_error(case: Case, result: np.ndarray, rows: np.ndarray, expected: np.ndarray) -> float:
    """|result - expected| / |expected| in the Frobenius norm, over those rows."""
    own = result[-1] if case.batch > 1 else result
    return float(np.linalg.norm(own[rows].astype(np.float64) - expected) / np.linalg.norm(expected))
