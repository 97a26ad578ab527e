"""What is best: prices tiles by a model or by measured times, and chooses one plan, with the order of its tiles.

Pure Python on facts: knows no jax, no cubin and no device of this process.
"""
