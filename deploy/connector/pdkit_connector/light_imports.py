"""Import vLLM without the compilers and models that it imports at once, for a look at the fixes.

They take most of the seconds that an import of vLLM takes, and no fix looks at them. Stand-ins take
their place in a process that serves nothing; an engine never sees them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pdkit_connector.layer_steps import ADAPTER

HEAVY = ("torch._dynamo", "torch._inductor", "transformers", "sympy")


def import_adapter() -> bool:
    """Import LMCache's adapter for vLLM with stand-ins; tell whether it could be.

    Where it could not, this process is spoiled for vLLM: torch remembers what was registered.
    """
    try:
        import torch  # noqa: F401 - it needs its own compilers, and comes first

        with _stand_ins():
            importlib.import_module(ADAPTER)
    except Exception:  # noqa: BLE001 - a vLLM that uses what it imports, or is broken
        return False
    return True


@contextmanager
def _stand_ins() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _is_heavy(name: str) -> bool:
    return any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of HEAVY."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_heavy(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """Has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        thing = _thing(name)
        setattr(self, name, thing)
        return thing


class _Thing(type):
    """A class that can be a base, a decorator, a type in an annotation, or a name to look into."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)

    def __getitem__(cls, _item: Any) -> Any:
        return cls

    def __or__(cls, _other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __contains__(cls, _item: Any) -> bool:
        return False


class _Anything:
    """What a thing makes: it can be called, entered, and looked into."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_named: Any) -> Any:
        # As a decorator it leaves what it decorates as it is.
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _thing(name: str) -> Any:
    return _Thing(name, (_Anything,), {})
