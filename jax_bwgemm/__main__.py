"""`python -m jax_bwgemm`."""

import os
import sys

from jax_bwgemm.cli.main import main

if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's own flush has a place
        code = 1
    sys.exit(code)
