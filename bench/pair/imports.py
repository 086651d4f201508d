"""Has processes of a stack watched from within, without a line in what they run.

A folder with a ``sitecustomize.py`` that calls a module's ``install`` goes before all else in
PYTHONPATH; what ``install`` wants to change of a module is done once that module is there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
ROLES = ("prefill", "decode", "router")

Then = Callable[[ModuleType], None]
"""What is done with a module that has come in."""


def role() -> str | None:
    """What this process of a stack is; None for any other process."""
    return next((word for word in sys.argv if word in ROLES), None)


def environment(install: Callable[[], None], variable: str, folder: Path) -> dict[str, str]:
    """Variables of a stack whose processes call ``install``, a function of a module here, before
    all else; ``variable`` names the folder that they write to, which is made."""
    site = folder / "site"
    site.mkdir(parents=True)
    name = install.__name__
    text = f"from {install.__module__} import {name}\n\n{name}()\n"
    (site / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, variable: str(folder)}


def once_imported(then: Mapping[str, Then]) -> None:
    """Do it with each of the modules, by name, at the end of its import, in a process with a role.
    Called before any of them is imported."""
    sys.meta_path.insert(0, _Finder(dict(then)))


class _Loader(importlib.abc.Loader):
    """Has a module looked at once it is there."""

    def __init__(self, loader: importlib.abc.Loader, then: Then) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As without."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As without, and then what was asked for."""
        self._loader.exec_module(module)
        self._then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the modules that are watched come in."""

    def __init__(self, then: dict[str, Then]) -> None:
        self._watched = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of a watched module, else none."""
        then = self._watched.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None and role() is not None:
            spec.loader = _Loader(spec.loader, then)
        return spec
