"""`python -m midstream.sidecar.mover`."""

import sys

from .process import main

sys.exit(main())
