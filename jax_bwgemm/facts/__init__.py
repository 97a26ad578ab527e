"""What is: problems, epilogues, devices, families, tiles, and the rules that follow from them.

Pure Python: knows no jax, no measured time, no file and no device of this process.
"""
