"""What an installed module offers, determined from its source without importing it where possible.

Distribution names prove nothing (on PyPI `aiter` is an unrelated package), so a kernel names the attribute that it calls.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast


OR = " or "
"""Between the names of an offer of which one suffices."""


def find_offer(offer: str, importing: bool = False) -> tuple[bool | None, str]:
    """Whether `"module:attr"` exists, or one of `"a:x or b:y"`: (True, ""), (False, why), or (None, why) if only an import can tell.

    Reads the module's source; runs none of it. With `importing`, an undecided module is imported and its attributes are looked up.
    """
    whys: list[str] = []
    decided = True
    for alternative in offer.split(OR):
        offered, why = _find(alternative, importing)
        if offered:
            return True, ""
        decided = decided and offered is False
        whys.append(why)
    return (False if decided else None), " and ".join(whys)


def _find(offer: str, importing: bool) -> tuple[bool | None, str]:
    """`find_offer` of one name."""
    module, _, attribute = offer.partition(":")
    offered, why = _by_source(module, attribute.partition(".")[0])
    undecided = offered is None or (offered and "." in attribute)
    if undecided and importing:
        return _by_import(module, attribute)
    return (None, f"{offer}: only an import can tell") if offered and undecided else (offered, why)


def _by_import(module: str, attribute: str) -> tuple[bool | None, str]:
    try:
        value: object = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:
        return False, f"{module}:{attribute} cannot be imported: {type(error).__name__}: {error}"
    return True, ""


def _by_source(module: str, name: str) -> tuple[bool | None, str]:
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as error:
        return False, f"module {top} cannot be found: {error}"
    if spec is None:
        return False, f"module {top} is not installed"
    folders = [Path(p) for p in spec.submodule_search_locations or ()]
    file = Path(spec.origin) if spec.origin and spec.origin not in ("built-in", "frozen") else None
    qualified = top
    for part in parts:
        qualified += f".{part}"
        packages = [folder / part for folder in folders if (folder / part).is_dir()]
        sources = [folder / f"{part}.py" for folder in folders if (folder / f"{part}.py").is_file()]
        if not packages and not sources:
            if any(True for folder in folders for _ in folder.glob(f"{part}.*so")):
                return None, f"{qualified} is a compiled module: only an import can tell"
            return False, f"{top} is installed, but has no module {qualified}"
        folders = packages
        file = packages[0] / "__init__.py" if packages else sources[0]
    if file is None or file.suffix != ".py" or not file.is_file():
        return None, f"{module} has no Python source: only an import can tell"
    return _names(file, module, name)


def _names(file: Path, module: str, name: str) -> tuple[bool | None, str]:
    import ast

    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return None, f"the source of {module} cannot be read: {error}"
    dynamic, unsure = False, f"{module}:{name}: only an import can tell"
    tried = [node for block in tree.body if isinstance(block, ast.Try) for node in block.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name and node in tree.body:
                return True, ""
            dynamic |= node.name == "__getattr__" and node in tree.body
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                dynamic |= alias.name == "*"
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    if node in tree.body or node in tried:
                        return True, ""  # of an import inside try that fails, the kernel's verification tells
                    return None, unsure  # an import inside if or a function may not happen
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return (True, "") if _at_top(tree, name) else (None, unsure)
    if any(isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name for n in ast.walk(tree)):
        return None, f"{module}:{name} is defined on a condition: only an import can tell"
    if dynamic:
        return None, f"{module} makes its names when imported: only an import can tell"
    return False, f"{module} is installed, but offers no {name} (an unrelated package of that name?)"


def _at_top(tree: ast.Module, name: str) -> bool:
    import ast

    body = tree.body
    targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in body if isinstance(n, ast.AnnAssign) and n.value is not None]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)
