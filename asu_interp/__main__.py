"""`python -m asu_interp` is `asu-interp`."""

from asu_interp.cli import main

main()
