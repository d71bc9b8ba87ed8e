"""``python -m loopscale`` and ``torchrun -m loopscale``."""

import sys

from loopscale.cli import main

sys.exit(main())
