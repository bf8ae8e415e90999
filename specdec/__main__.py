"""`python -m specdec`, and `accelerate launch -m specdec`."""

from specdec.cli import main

main()
