"""What all tests share: an import path for builders and hypothesis without a stopwatch."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

# Last, so that an installed wheel is tested rather than the checkout around these tests.
sys.path.append(str(Path(__file__).parents[1]))

settings.register_profile("halos", deadline=None, print_blob=True)
settings.load_profile("halos")
