"""`python -m jax_bwgemm`."""

import sys

from jax_bwgemm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
