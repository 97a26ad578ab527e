"""The ahead-of-time build: the catalogue of what ships, compiling it in processes, and the checks of what came out.

Modules that need the compiler are imported where a kernel is compiled; the others work without it.
"""
