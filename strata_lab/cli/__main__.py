"""`python -m strata_lab.cli`."""

from strata_lab.cli import main

main()
