"""Programs that run as modules and as scripts: each imports its neighbours by their bare names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
