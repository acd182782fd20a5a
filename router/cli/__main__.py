"""`python -m router.cli` is `warmroute`."""

from router.cli import main

main()
