"""The layering of the packages, read from the source: imports inside functions count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvcore", "kernels", "replica", "router")

# package -> our other packages it may import
ALLOWED = {"kvcore": set(), "kernels": set(), "replica": {"kvcore", "kernels"}, "router": {"kvcore"}}
# (file, module) pairs beyond that: the composition root
EXCEPTIONS = {("router/app.py", "replica.deployment")}
FORBIDDEN = {"kvcore": {"torch", "ray", "triton"}, "kernels": {"ray"}, "router": {"torch", "triton"}}
RAY_FILES = {
    "replica/deployment.py",
    "router/app.py",
    "router/lab/sim/policies/ray_prefix.py",  # Ray's own prefix tree, to compare with
    "router/ray_router.py",
    "router/sync.py",
}


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file imports, absolute names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_the_layers_below(package: str) -> None:
    assert sources(package)
    wrong = []
    for path in sources(package):
        name = path.relative_to(ROOT).as_posix()
        for module in imports_of(path):
            top = module.split(".")[0]
            foreign = top in PACKAGES and top != package and top not in ALLOWED[package]
            if (foreign and (name, module) not in EXCEPTIONS) or top in FORBIDDEN.get(package, set()):
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_ray_appears_only_in_the_adapters() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in sources(package)
        if any(module.split(".")[0] == "ray" for module in imports_of(path))
    }
    assert {name for name in users if not name.startswith("router/cli/")} <= RAY_FILES


def test_the_product_never_imports_transformers() -> None:
    for package in PACKAGES:
        for path in sources(package):
            assert not any(m.split(".")[0] == "transformers" for m in imports_of(path)), path


def test_files_stay_small() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for package in PACKAGES
        for path in sources(package)
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        p for package in PACKAGES for p in sources(package) if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    text = path.read_text()
    silent = {n for n, line in enumerate(text.splitlines(), 1) if not line.strip() or line.strip()[0] == "#"}
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            silent |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(text.splitlines()) - len(silent)


def test_the_cache_core_stays_small() -> None:
    assert 0 < sum(lines_of_code(path) for path in sources("kvcore")) < 2000
