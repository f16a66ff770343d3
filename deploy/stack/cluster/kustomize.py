"""What kustomize reads: its own documents, and files that it makes ConfigMaps of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deploy.stack.cluster.code import FOLDER, CodeMap
from deploy.stack.cluster.objects import Object
from deploy.stack.document import document_yaml

KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}


def generator(maps: Iterable[Object]) -> dict[str, Any]:
    """Return ConfigMaps that kustomize names by their contents: a change starts pods again."""
    return {"configMapGenerator": [{**one, "options": {"immutable": True}} for one in maps]}


def code_entry(code: CodeMap) -> Object:
    """Return the entry of a generator for code."""
    return {
        "name": code.name,
        "files": [f"{key}={FOLDER}/{path}" for path, key in code.keys.items()],
    }


def code_files(maps: Iterable[CodeMap]) -> dict[str, str]:
    """Return path → text of the files that the entries of code name."""
    return {f"{FOLDER}/{path}": text for code in maps for path, text in code.files.items()}


def objects_yaml(objects: Sequence[Object]) -> str:
    """Return objects as one file of YAML documents."""
    return "---\n".join(document_yaml(one) for one in objects)
