"""`python -m incseg`, also under torchrun."""

import sys

from incseg.cli import main

sys.exit(main())
