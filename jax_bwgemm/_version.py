"""The package's version: what pyproject reads and what a manifest must match."""

__version__ = "0.1.0"
