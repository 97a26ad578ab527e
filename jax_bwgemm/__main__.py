"""`python -m jax_bwgemm`."""

import sys

if __name__ == "__main__":
    try:
        from jax_bwgemm.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:  # before there is a command
        sys.exit(130)
