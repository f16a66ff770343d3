"""Download a model into the hub's cache, with the hub's own client and its progress bar.

Complete files are not downloaded again. Within a run, a broken download resumes where it stopped;
the next run starts an incomplete file again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from deploy.runtime.hub import HubError

# What engines read where there are safetensors; the same weights in other formats are left out.
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot")
_ORIGINALS = ("original/*", "metal/*")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WantedModel:
    """A model of the hub.

    Attributes:
        revision: a commit, or the name of a branch.
        cache: the folder of the hub's models.
    """

    model: str
    revision: str
    cache: Path

    @property
    def folder(self) -> Path:
        """The model's folder in the cache of the hub, whether or not it is there."""
        return self.cache / f"models--{self.model.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of this revision's files, where it is here."""
        ref = self.folder / "refs" / self.revision
        commit = ref.read_text("utf-8").strip() if ref.is_file() else self.revision
        return self.folder / "snapshots" / commit

    def is_here(self) -> bool:
        """Tell whether all weights are here; a file appears in the cache when it is whole."""
        try:
            index = json.loads((self.snapshot / _INDEX).read_text(encoding="utf-8"))
            return all((self.snapshot / name).is_file() for name in index["weight_map"].values())
        except FileNotFoundError:
            found = (*self.snapshot.glob("*.safetensors"), *self.snapshot.glob("*.bin"))
            return any(file.is_file() for file in found)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False


def fetch(wanted: WantedModel, address: str, token: str | None) -> None:
    """Fetch what is missing of a model; shows the client's progress bar on stderr.

    Raises:
        HubError: the hub does not answer, or not with all of it.
    """
    from huggingface_hub import HfApi, snapshot_download

    given = token or False  # the client must not look for a token itself
    try:
        api = HfApi(endpoint=address, token=given)
        files = api.list_repo_files(wanted.model, revision=wanted.revision)
        others = _OTHER_FORMATS if any(name.endswith(".safetensors") for name in files) else ()
        snapshot_download(
            wanted.model,
            revision=wanted.revision,
            cache_dir=wanted.cache,
            endpoint=address,
            token=given,
            ignore_patterns=[*_ORIGINALS, *others],
        )
    except Exception as exc:  # the client's errors depend on its HTTP library, which changed twice
        said = str(exc).strip().partition("\n")[0] or type(exc).__name__
        raise HubError(f"{address}: {said}") from exc


def give_to(wanted: WantedModel, uid: int, gid: int) -> None:
    """Give the model's files to a user; the caller is root."""
    for top in (wanted.folder, wanted.cache / ".locks"):
        for path in (top, *top.rglob("*")):
            if path.exists() or path.is_symlink():
                os.chown(path, uid, gid, follow_symlinks=False)
