"""The wheel and the editable install hold all that a checkout holds, and work from any folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("eagle_tree", "conf", "pyproject.toml", "README.md", "LICENSE")
ASSETS = {".safetensors", ".json", ".jsonl", ".md", ".html"}
REPORT = """
import importlib.util, pathlib
import eagle_tree
from eagle_tree.apps.common import conf_dir
from eagle_tree.prompts import load_bundled
load_bundled()
print(pathlib.Path(eagle_tree.__file__).parent)
print(conf_dir())
"""


def has_build_backend() -> bool:
    """setuptools that knows license expressions (77); builds must not need the network."""
    return importlib.util.find_spec("setuptools") is not None and int(version("setuptools").split(".")[0]) >= 77


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_build_backend(), reason="setuptools >= 77, the build backend, is not installed"),
]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder: Path, suffixes: set[str]) -> set[str]:
    """Files below a folder with one of the suffixes, relative to it."""
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.suffix in suffixes}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a stale build folder of the real checkout could fill the wheel with what is gone."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", folder, checkout, cwd=folder)
    (built,) = folder.glob("eagle_tree-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_module(wheel_names: set[str]):
    modules = {f"eagle_tree/{name}" for name in files(ROOT / "eagle_tree", {".py"})}
    assert "eagle_tree/prompts.py" in modules
    assert modules - wheel_names == set()


def test_wheel_holds_every_configuration_file_with_its_subfolder(wheel_names: set[str]):
    configuration = {f"eagle_tree/conf/{name}" for name in files(ROOT / "conf", {".yaml"})}
    assert "eagle_tree/conf/bench.yaml" in configuration
    assert any(name.count("/") == 3 for name in configuration)
    assert configuration - wheel_names == set()


def test_wheel_holds_every_asset(wheel_names: set[str]):
    assets = {f"eagle_tree/assets/{name}" for name in files(ROOT / "eagle_tree" / "assets", ASSETS)}
    assert "eagle_tree/assets/prompts.jsonl" in assets
    assert assets - wheel_names == set()


def test_wheel_holds_the_licence_and_the_console_command_and_no_tests(wheel: Path, wheel_names: set[str]):
    (scripts,) = (name for name in wheel_names if name.endswith("dist-info/entry_points.txt"))
    assert "eagle-tree = eagle_tree.apps.cli:main" in zipfile.ZipFile(wheel).read(scripts).decode()
    assert any(name.endswith("/LICENSE") for name in wheel_names)
    assert {name.split("/")[0] for name in wheel_names} == {"eagle_tree", scripts.split("/")[0]}


def test_installed_wheel_finds_its_own_configuration_from_another_folder(wheel: Path, tmp_path: Path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=elsewhere)
    (site / "conf").mkdir()  # somebody else's: a folder beside the package must not be taken for ours
    (site / "conf" / "bench.yaml").touch()
    package, conf = run(sys.executable, "-c", REPORT, cwd=elsewhere, PYTHONPATH=str(site)).split("\n")[:2]
    assert Path(package) == site / "eagle_tree"
    assert Path(conf) == site / "eagle_tree" / "conf"
    assert (Path(conf) / "bench.yaml").read_text() == (ROOT / "conf" / "bench.yaml").read_text()


def test_editable_install_finds_the_configuration_of_its_checkout_from_another_folder(checkout: Path, tmp_path: Path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=checkout)
    (built,) = tmp_path.glob("eagle_tree-*.whl")
    zipfile.ZipFile(built).extractall(site)
    # -S: an editable install of the real checkout goes by the same names and would answer in this one's place
    activate = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({sysconfig.get_path('purelib')!r})"
    package, conf = run(sys.executable, "-S", "-c", activate + REPORT, cwd=elsewhere, PYTHONPATH="").split("\n")[:2]
    assert Path(package) == checkout / "eagle_tree"
    assert Path(conf) == checkout / "conf"


def test_checkout_finds_its_configuration_without_an_installation(checkout: Path, tmp_path: Path):
    package, conf = run(sys.executable, "-c", REPORT, cwd=tmp_path, PYTHONPATH=str(checkout)).split("\n")[:2]
    assert Path(package) == checkout / "eagle_tree"
    assert Path(conf) == checkout / "conf"
