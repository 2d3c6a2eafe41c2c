"""What every verb shares."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The folder of the hydra configuration: `eagle_tree/conf` in a wheel, `conf` of the checkout otherwise.

    An editable install runs from the checkout. The packaged folder is asked first: beside an installed package,
    the checkout's place would be a folder `conf` in site-packages, which may be anybody's.

    Raises:
        FileNotFoundError: neither folder is there, so the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "bench.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration in {package / 'conf'} or {package.parent / 'conf'}; install again")
