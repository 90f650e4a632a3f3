"""Programs that run as modules and as scripts. They import each other by file name, without the package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
