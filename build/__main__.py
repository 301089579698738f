"""`python -m build` from the repository's root."""

from .cli import main

raise SystemExit(main())
