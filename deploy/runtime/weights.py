"""Download a model into the hub's cache, with the hub's own client and its progress bar.

Complete files are not downloaded again. Within a run, a broken download resumes where it stopped;
the next run starts an incomplete file again.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from deploy.config.weight_files import ReadIndex, chosen_weights, indexed_files, weights_in
from deploy.connector.pdkit_connector.identity.model_files import (
    WEIGHTS,
    cached_model,
    cached_snapshot,
)
from deploy.runtime.hub import HubError

# Weights in formats that no engine reads.
_OTHER_FORMATS = ("*.h5", "*.msgpack", "*.onnx", "*.ot")
_ORIGINALS = ("original/*", "metal/*")


@dataclass(frozen=True)
class WantedModel:
    """A model of the hub.

    Attributes:
        revision: a commit, or the name of a branch.
        cache: the folder of the hub's models.
        load_format: vLLM's option, by which engines choose among the formats of the weights.
    """

    model: str
    revision: str
    cache: Path
    load_format: str = "auto"

    @property
    def folder(self) -> Path:
        """The model's folder in the cache of the hub, whether or not it is there."""
        return cached_model(self.cache, self.model)

    @property
    def snapshot(self) -> Path:
        """The folder of this revision's files, where it is here."""
        return cached_snapshot(self.cache, self.model, self.revision)

    def is_here(self) -> bool:
        """Tell whether all weights are here; a file appears in the cache when it is whole."""
        try:
            found = weights_in(self.snapshot, self.load_format)
        except OSError:
            return False
        return bool(found.files) and not found.missing


def fetch(wanted: WantedModel, address: str, token: str | None) -> None:
    """Fetch what is missing of a model; shows the client's progress bar on stderr.

    Of weights in several formats, those that engines load.

    Raises:
        HubError: the hub does not answer, or not with all of it.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    given = token or False  # the client must not look for a token itself
    try:
        api = HfApi(endpoint=address, token=given)
        files = api.list_repo_files(wanted.model, revision=wanted.revision)

        def read_index(name: str) -> Collection[str]:
            index = hf_hub_download(
                wanted.model,
                name,
                revision=wanted.revision,
                cache_dir=wanted.cache,
                endpoint=address,
                token=given,
            )
            return indexed_files(Path(index))

        snapshot_download(
            wanted.model,
            revision=wanted.revision,
            cache_dir=wanted.cache,
            endpoint=address,
            token=given,
            ignore_patterns=[*_ORIGINALS, *_OTHER_FORMATS, *_unread(files, read_index, wanted)],
        )
    except Exception as exc:  # the client's errors depend on its HTTP library, which changed twice
        said = str(exc).strip().partition("\n")[0] or type(exc).__name__
        raise HubError(f"{address}: {said}") from exc


def _unread(files: Sequence[str], read_index: ReadIndex, wanted: WantedModel) -> Iterator[str]:
    """Yield patterns of the weights that engines neither load nor fetch themselves."""
    chosen = chosen_weights(files, read_index, wanted.load_format)
    suffixes = {PurePosixPath(name).suffix for name in chosen.files}
    for name in files if chosen.files else ():
        below = "/" in name and not chosen.complete
        fetched = PurePosixPath(name).suffix in suffixes if below else name in chosen.files
        if not fetched and any(fnmatch(name, pattern) for pattern in WEIGHTS):
            yield glob.escape(name)


def give_to(wanted: WantedModel, uid: int, gid: int) -> None:
    """Give the model's files to a user; the caller is root."""
    for top in (wanted.folder, wanted.cache / ".locks"):
        for path in (top, *top.rglob("*")):
            if path.exists() or path.is_symlink():
                os.chown(path, uid, gid, follow_symlinks=False)
