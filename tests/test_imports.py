"""Who may import whom, and who may draw random numbers: the rules of the layout, checked on the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import eagle_tree

PACKAGE = Path(eagle_tree.__file__).parent
APPS = "apps"
DRAFTERS = "drafter.*"
POLICIES = "policy.*"
RULES = "accept.*"
FIGURES = "plots.*"

ALLOWED: dict[str, set[str]] = {
    # a module that is not in this table fails the test: decide what it may import
    "": set(),
    "tree": {"checks"},
    "noise": set(),
    "cost": {"checks", "files"},
    "cache": set(),
    "checks": set(),
    "calibration": {"checks", "files"},
    "clock": set(),
    "files": set(),
    "prompts": {"checks"},
    "warp": {"checks", "tree"},
    "record": {"files", "tree"},
    "policy": {POLICIES},
    "policy.base": {"tree", "cost", "calibration"},
    "policy.fixed": {"checks", "tree", "policy.base"},
    "policy.measured": {"checks", "files", "cost", "policy.fixed"},
    "policy.dynamic": {"checks", "tree", "policy.base"},
    "policy.stops": {"checks", "tree", "policy.base"},
    "policy.hindsight": {"tree"},
    "policy.anticipation": {"tree", "policy.base"},
    "policy.calibrated": {"tree", "calibration", "policy.base"},
    "policy.rate": {"checks", "tree", "cost", "policy.base", "policy.dynamic", "policy.stops"},
    "draw": {"tree", "noise"},
    "accept": {RULES},
    "accept.base": {"tree", "noise", "warp"},
    "accept.match": {"tree", "noise", "warp", "accept.base"},
    "accept.trials": {"tree", "noise", "warp", "accept.base", "accept.match"},
    "accept.block": {"tree", "noise", "warp", "accept.base", "accept.trials"},
    "accept.typical": {"checks", "tree", "noise", "warp", "accept.base"},
    "pairs": {"tree", "accept", "policy", "policy.anticipation"},
    "target": {"tree", "cache"},
    "drafter": set(),
    "drafter.base": {"tree", "cache", "noise"},
    "drafter.eagle": {"tree", "cache", "noise", "draw", "drafter.base"},
    "drafter.medusa": {"checks", "tree", "cache", "noise", "draw", "drafter.base"},
    "drafter.ngram": {"tree", "cache", "noise", "draw", "drafter.base"},
    "drafter.lm": {"tree", "cache", "noise", "draw", "drafter.base", "target"},
    "decode": {
        "checks", "tree", "noise", "warp", POLICIES, "policy", "accept", "accept.base", "pairs", "target",
        "drafter.base", "record", "cache", "clock",
    },
    "trace": {
        "tree", "noise", "warp", "policy", POLICIES, "decode", "evaluate", "target", "cache", "drafter.base", "files",
    },
    "replay": {
        "tree", "policy", POLICIES, "accept", "cost", "evaluate", "record", "trace",
    },
    "appraise": {
        "tree", "noise", "warp", "policy", "cache", "decode", "evaluate", "target", "drafter.base", "trace",
    },
    "regret": {"tree", "noise", "policy", POLICIES, "decode", "analysis", "replay", "trace"},
    "bound": {"cost", "trace"},
    "roofline": {"checks", "cost"},
    "certify": {"tree", "draw", "accept", RULES, "noise", "warp", "policy", POLICIES},
    "compare": {"checks", "tree", "draw", "accept", "noise", "warp", "target", "drafter.base"},
    "mutants": {"tree", "accept", RULES, "noise", "warp", "certify"},
    "simulate": {"tree", "accept", RULES, "noise", "warp", "certify"},
    "audit": {"noise", "target", "warp"},
    "checkpoint": {"checks", "files", DRAFTERS},
    "losses": set(),
    "features": {"files", "target"},
    "objective": {"checks", "checkpoint", DRAFTERS, "features", "losses", "target"},
    "train": {"checks", "files", "features", "objective", "target"},
    "corpus": {"checks", "files", "target"},
    "evaluate": {
        "tree", "calibration", "cost", "warp", "policy", POLICIES, "target", "drafter.base", "decode",
        "record", "files",
    },
    "runs": {"record"},
    "analysis": {"calibration", "cost", "runs"},
    "curves": {"analysis", "calibration"},
    "plots": {FIGURES},
    "plots.style": {"files"},
    "plots.runs": {"analysis", "plots.style"},
    "plots.nodes": {"plots.style"},
    "plots.costs": {"analysis", "plots.style"},
    "plots.policies": {"plots.style"},
    "explore": set(),
}  # fmt: skip
"""Module (without the package's name) to the house modules it may import. Apps may import everything."""

DRAWING_MODULES = ("decode", "draw", "accept", "warp", "noise", "policy", "tree")
"""With the drafters: what decides a text draws from keyed noise alone."""

SAMPLERS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal", "rand_like", "randn_like"}
SAMPLERS |= {f"{name}_" for name in ("random", "normal", "uniform", "bernoulli", "exponential", "cauchy", "log_normal")}


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """`drafter/eagle.py` is `drafter.eagle`, `drafter/__init__.py` is `drafter`, the package itself is empty."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(package: Path = PACKAGE) -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the package, parsed."""
    return {module_name(path, package): (path, ast.parse(path.read_text())) for path in sorted(package.rglob("*.py"))}


def imported(name: str, path: Path, tree: ast.Module, known: set[str]) -> tuple[set[str], set[str]]:
    """House modules and foreign top-level packages that a module imports anywhere, functions included."""
    house, foreign = set(), set()

    def add(dotted: str) -> None:
        top, _, rest = dotted.partition(".")
        if top != "eagle_tree":
            foreign.add(top)
            return
        while rest and rest not in known:  # `from eagle_tree.tree import Tree` imports the module `tree`
            rest = rest.rpartition(".")[0]
        house.add(rest)

    own_package = ["eagle_tree", *name.split(".")][: None if path.name == "__init__.py" else -1]
    own_package = [part for part in own_package if part]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = own_package[: len(own_package) + 1 - node.level] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                add(f"{source}.{alias.name}")
        elif isinstance(node, ast.Call) and called(node.func) in ("import_module", "__import__"):
            house.add("a module by its name in a string")
    return house - {name}, foreign


def called(function: ast.expr) -> str:
    """The last part of a called name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def import_faults(package: Path = PACKAGE) -> list[str]:
    """Every breach of the table, in words."""
    found, faults = modules(package), []
    for name, (path, tree) in found.items():
        house, foreign = imported(name, path, tree, set(found))
        house -= {""}  # the package itself holds its version only
        in_apps = name.split(".")[0] == APPS
        if not in_apps:
            if name not in ALLOWED:
                faults.append(f"{name} is not in the table: decide what it may import")
                continue
            allowed = ALLOWED[name]
            for group in (DRAFTERS, POLICIES, RULES, FIGURES):
                if group in allowed:
                    allowed = allowed | {other for other in found if other.startswith(group.removesuffix("*"))}
            faults += [f"{name} must not import {other}" for other in sorted(house - allowed)]
            faults += [f"{name} must not import {other}" for other in sorted(foreign & {"hydra", "omegaconf"})]
    return faults


def noise_faults(package: Path = PACKAGE) -> list[str]:
    """Calls that draw from, or seed, a generator that is not passed explicitly, in the modules that decide a text."""
    faults = []
    for name, (_, tree) in modules(package).items():
        if name not in DRAWING_MODULES and not name.startswith(("drafter.", "policy.", "accept.")):
            continue
        exempt = {id(node) for fork in ast.walk(tree) if is_forked_random(name, fork) for node in ast.walk(fork)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in exempt:
                continue
            what, place = called(node.func), f"{name}:{node.lineno}"
            if what in ("manual_seed", "seed") and not on_a_generator(node):
                faults.append(f"{place} seeds a global generator")
            if what in SAMPLERS and not any(keyword.arg == "generator" for keyword in node.keywords):
                faults.append(f"{place} draws {what} without generator=")
    return faults


def is_forked_random(name: str, node: ast.AST) -> bool:
    """`EagleHead.random`, the one documented place: a `with torch.random.fork_rng()` that initialises a head."""
    return name == "drafter.eagle" and isinstance(node, ast.With) and "fork_rng" in ast.unparse(node.items[0])


def on_a_generator(node: ast.Call) -> bool:
    """Whether `x.manual_seed(…)` is called on a `torch.Generator(…)`."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return isinstance(owner, ast.Call) and called(owner.func) == "Generator"


# --- the package keeps its rules ---


def test_every_module_imports_what_the_layout_allows():
    assert import_faults() == []


def test_nothing_that_decides_a_text_draws_from_a_global_generator():
    assert noise_faults() == []


def test_the_rules_speak_of_the_modules_that_are_there():
    """The walk finds the package (a checker that walks nothing would pass)."""
    found = set(modules())
    assert {"tree", "decode", "target", "drafter.eagle", "apps.cli", "train", "corpus"} <= found
    house, foreign = imported("decode", *modules()["decode"], found)
    assert {"tree", "accept", "target", "drafter.base"} <= house
    assert "torch" in foreign


def test_the_exemption_is_used_by_one_place():
    """If `EagleHead.random` no longer forks the generator, its exemption goes too."""
    name = "drafter.eagle"
    assert sum(is_forked_random(name, node) for node in ast.walk(modules()[name][1])) == 1


# --- the checker sees breaches ---


def package_with(tmp_path: Path, **files: str) -> Path:
    """A synthetic package of some empty modules, and the given ones."""
    for name in ("tree", "noise", "target", "decode", "policy", "drafter/base", "drafter/eagle", "apps/cli"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for name, text in files.items():
        (tmp_path / f"{name.replace('__', '/')}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("tree", "from eagle_tree.noise import Noise", "tree must not import noise"),
        ("tree", "from eagle_tree import noise", "tree must not import noise"),
        ("tree", "import eagle_tree.noise as n", "tree must not import noise"),
        ("tree", "from . import noise", "tree must not import noise"),
        ("tree", "from .noise import Noise", "tree must not import noise"),
        ("tree", "def f():\n    from eagle_tree.noise import Noise", "tree must not import noise"),
        ("tree", "if TYPE_CHECKING:\n    from eagle_tree.noise import Noise", "tree must not import noise"),
        ("drafter__eagle", "from ..target import Target", "drafter.eagle must not import target"),
        ("drafter__base", "from .eagle import EagleDrafter", "drafter.base must not import drafter.eagle"),
        ("decode", "from eagle_tree.drafter.eagle import X", "decode must not import drafter.eagle"),
        ("decode", "from eagle_tree.apps.cli import main", "decode must not import apps.cli"),
        ("decode", "import hydra", "decode must not import hydra"),
        ("decode", "from omegaconf import DictConfig", "decode must not import omegaconf"),
        ("decode", "importlib.import_module(n)", "decode must not import a module by its name in a string"),
        ("surprise", "", "surprise is not in the table: decide what it may import"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, line, fault):
    assert import_faults(package_with(tmp_path)) == []
    assert import_faults(package_with(tmp_path, **{file: line})) == [fault]


def test_apps_may_import_everything(tmp_path):
    lines = (
        "import hydra\nfrom omegaconf import OmegaConf\nfrom eagle_tree import decode\nfrom eagle_tree.apps import x"
    )
    assert import_faults(package_with(tmp_path, apps__cli=lines)) == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("decode", "torch.manual_seed(0)", "decode:1 seeds a global generator"),
        ("decode", "torch.cuda.manual_seed_all(0) or np.random.seed(0)", "decode:1 seeds a global generator"),
        ("policy", "x = torch.rand(3)", "policy:1 draws rand without generator="),
        ("noise", "x = p.multinomial(1)", "noise:1 draws multinomial without generator="),
        ("tree", "x = torch.empty(3).uniform_()", "tree:1 draws uniform_ without generator="),
        ("drafter__eagle", "\nx = torch.randint(9, (3,))", "drafter.eagle:2 draws randint without generator="),
        (
            "drafter__base",
            "with torch.random.fork_rng():\n    torch.manual_seed(1)",
            "drafter.base:2 seeds a global generator",
        ),
    ],
)
def test_a_global_draw_is_found(tmp_path, file, line, fault):
    assert noise_faults(package_with(tmp_path)) == []
    assert noise_faults(package_with(tmp_path, **{file: line})) == [fault]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("decode", "x = torch.rand(3, generator=g)"),
        ("decode", "g = torch.Generator().manual_seed(0)"),
        ("drafter__eagle", "with torch.random.fork_rng():\n    torch.manual_seed(1)"),
        ("target", "torch.manual_seed(0)"),  # not a module that decides a text
    ],
)
def test_explicit_generators_are_fine(tmp_path, file, line):
    assert noise_faults(package_with(tmp_path, **{file: line})) == []
