"""Prints the path of a folder with PyTorch's test files for the installed torch. Fetches missing files.

python scripts/pytorch_tests.py                   # a sparse checkout of the installed torch's commit, cached
python scripts/pytorch_tests.py --source FOLDER   # an existing checkout, for machines without a network
"""

import argparse
import os
import pathlib
import subprocess
import sys

REPOSITORY = "https://github.com/pytorch/pytorch"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", help="a checkout of PyTorch", default=os.environ.get("TANDEM_PYTORCH_SOURCE")
    )
    parser.add_argument("--commit", help="instead of the installed torch's")
    options = parser.parse_args()
    folder = pathlib.Path(options.source) if options.source else fetched(options.commit or installed())
    if not (folder / "test" / "test_torch.py").is_file():
        print(f"{folder} is no checkout of PyTorch: it has no test/test_torch.py", file=sys.stderr)
        return 1
    print(folder.resolve())
    return 0


def installed() -> str:
    """Return the commit that the installed torch was built from."""
    import torch

    return torch.version.git_version


def fetched(commit: str) -> pathlib.Path:
    """Return a checkout of one commit that has only the folder `test` and no history."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    folder = cache / "tandem" / f"pytorch-{commit[:12]}"
    if not (folder / "test" / "test_torch.py").is_file():
        folder.mkdir(parents=True, exist_ok=True)

        def git(*arguments: str) -> None:
            subprocess.run(["git", "-C", str(folder), *arguments], check=True, stdout=sys.stderr)

        git("init", "--quiet")
        git("sparse-checkout", "set", "test")
        git("fetch", "--quiet", "--depth=1", "--filter=blob:none", REPOSITORY, commit)
        git("checkout", "--quiet", "FETCH_HEAD")
    return folder


if __name__ == "__main__":
    sys.exit(main())
