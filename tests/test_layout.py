"""The rules by which one namespace is spread over the top-level folders."""

import ast
import importlib
import operator
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PORTIONS = sorted(
    path.parent.name for path in ROOT.glob("*/tandem") if path.parent.name != "charts"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_LINES = 600


def test_standard_library_is_not_shadowed():
    """A folder named like a module of the standard library does not hide that module."""
    assert operator.itemgetter(1)("ab") == "b"


@pytest.mark.parametrize("portion", PORTIONS)
def test_one_portion_has_the_names_of_the_whole(portion: str):
    """One ``tandem/__init__.py`` finds all portions; a second one would hide them."""
    assert not (ROOT / portion / "__init__.py").exists()
    assert (ROOT / portion / "tandem" / "__init__.py").exists() is (portion == "llm")


def test_names_of_programs_come_from_the_package_itself():
    """``from tandem import LLM`` works without loading an engine; a wrong name has the nearest."""
    script = (
        "import sys\n"
        "from tandem import LLM, SamplingParams, StructuredOutputsParams\n"
        "import tandem, tandem.operator.api, tandem.engine.config\n"
        "assert 'torch' not in sys.modules\n"
        "tandem.SamplingParam\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert "no attribute 'SamplingParam'; SamplingParams is the nearest" in done.stderr


@pytest.mark.parametrize("portion", PORTIONS)
def test_portion_imports_from_its_folder(portion: str):
    """``tandem.<folder>`` is the package in that folder, and it is typed for its users."""
    module = importlib.import_module(f"tandem.{portion}")
    package = ROOT / portion / "tandem" / portion
    assert module.__file__ == str(package / "__init__.py")
    assert (package / "py.typed").is_file()


@pytest.mark.parametrize("portion", PORTIONS)
def test_every_folder_of_code_is_a_package(portion: str):
    """A folder without ``__init__.py`` would be missing from the layers that are checked."""
    folders = {file.parent for file in (ROOT / portion / "tandem" / portion).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("wheel", PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]),
        ("editable install", PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]),
        ("types", PROJECT["tool"]["mypy"]["files"]),
        ("search path of types", PROJECT["tool"]["mypy"]["mypy_path"].split(":")),
        ("sources of ruff", PROJECT["tool"]["ruff"]["src"]),
        ("namespaces of ruff", PROJECT["tool"]["ruff"]["namespace-packages"]),
        ("layers", PROJECT["tool"]["importlinter"]["root_packages"]),
        ("coverage", PROJECT["tool"]["coverage"]["run"]["source_pkgs"]),
    ],
)
def test_every_list_names_every_portion(where: str, names: list[str]):
    """A portion missing from one list would go unbuilt, unchecked or untested in silence."""
    bare = {
        name.removeprefix("$MYPY_CONFIG_FILE_DIR/").removesuffix("/tandem").removeprefix("tandem.")
        for name in names
    }
    others = ("examples", "scripts", "tests")
    assert {name for name in bare if not name.startswith(others)} == set(PORTIONS), where


def test_placement_imports_only_protocol():
    """Where a request goes is a pure function of protocol's values."""
    folder = ROOT / "router" / "tandem" / "router" / "placement"
    allowed = ("tandem.protocol", "tandem.router.placement")
    for file in folder.rglob("*.py"):
        for name in imports(file):
            assert name.startswith(allowed) or name.split(".")[0] in sys.stdlib_module_names, (
                f"{file.name} imports {name}"
            )


def imports(file: Path) -> list[str]:
    """The modules that a file names in its import statements, at any depth."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names.append(node.module or "")
    return names


def test_no_product_file_is_too_long():
    """No product file is longer than MAX_LINES."""
    folders = [*PORTIONS, "examples", "scripts"]
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    long = {file.name: count for file in sources if (count := lines(file)) > MAX_LINES}
    assert long == {}


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_no_private_index_is_named():
    """The lock names PyPI alone, so that it works wherever PyPI does."""
    lock = (ROOT / "uv.lock").read_text()
    hosts = {part.split("/")[0] for part in lock.split("https://")[1:]}
    assert hosts <= {"pypi.org", "files.pythonhosted.org"}


def test_no_merge_was_left_half_done():
    """No page or file has the marks of a conflict."""
    named = subprocess.run(["git", "grep", "-lE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True)
    assert named.returncode == 1, named.stdout.decode() + named.stderr.decode()
