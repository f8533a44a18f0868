"""`python -m midstream.sidecar.replicas`."""

import sys

from .process import main

if __name__ == "__main__":
    sys.exit(main())
