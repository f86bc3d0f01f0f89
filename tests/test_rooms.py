"""The tree reads as WORKSPACE.md says: arrows run one way, files are small, importing touches no device."""

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent / "biphasic_jax"
# A room may import from itself and from those before it.
ORDER = ("errors", "overrides", "config", "recipe", "plan", "data", "objectives", "model", "train", "bench", "__main__")
SAME_FLOOR = {"data", "objectives", "model"}


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("biphasic_jax."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("biphasic_jax."))


def test_nothing_imports_upward():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        for target in imports_of(path):
            same_floor = room in SAME_FLOOR and target in SAME_FLOOR
            if ORDER.index(target) > ORDER.index(room) and not same_floor:
                wrong.append(f"{path.relative_to(ROOT)} imports {target}")
    assert wrong == []


def test_the_host_side_does_not_need_jax():
    code = (
        "import sys, pkgutil, importlib\n"
        "import biphasic_jax.data, biphasic_jax.objectives\n"
        "for package in (biphasic_jax.data, biphasic_jax.objectives):\n"
        "    for m in pkgutil.iter_modules(package.__path__):\n"
        "        importlib.import_module(f'{package.__name__}.{m.name}')\n"
        "bad = [m for m in ('tensorflow', 'torch', 'clu', 'flax', 'optax') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_h6_importing_everything_initialises_no_device():
    code = (
        "import pkgutil, importlib, sys\n"
        "import biphasic_jax\n"
        "for m in pkgutil.walk_packages(biphasic_jax.__path__, 'biphasic_jax.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was initialised'\n"
        "bad = [m for m in ('tensorflow', 'torch', 'clu') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_over_400_lines():
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}
