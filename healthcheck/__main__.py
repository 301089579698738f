"""`python -m healthcheck`: the same as the installed command `flashnext-health`."""

import sys

from .probe import main

sys.exit(main())
