"""What services are run with: programs of this machine, or images."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ConfigError

if TYPE_CHECKING:
    from deploy.assets import Kit
    from deploy.config.model import Model
    from deploy.config.spec import SettledSpec, StackSpec
    from deploy.runtime.home import Home
    from deploy.stack.containers import ContainerImages
    from deploy.stack.layout import Layout


@dataclass(frozen=True)
class Programs:
    """The programs that services are run with, where they are processes.

    Attributes:
        redis_server: "" if the user has a Redis of their own.
        prometheus, grafana: "" if they are not wanted, or Grafana is not installed.
    """

    engine_python: str
    redis_server: str
    prometheus: str = ""
    grafana: str = ""

    engine_image = ""
    hub_token = False  # processes read the user's own
    has_code = True

    @property
    def owner(self) -> tuple[int, int]:
        """The numbers of the user and the group that services run as."""
        return os.getuid(), os.getgid()

    def needed_images(self, *, user_redis: bool) -> tuple[str, ...]:  # noqa: ARG002
        """Return the images that must be on this machine: none."""
        return ()

    def hub_folder(self, spec: StackSpec) -> Path | None:
        """Return the folder for models of the hub; None for the default."""
        return spec.hub_cache

    def require_visible(self, model: Model) -> None:
        """Do nothing: processes see what the user sees."""

    def layout(
        self,
        spec: SettledSpec,
        home: Home,
        model: Model,  # noqa: ARG002
        kit: Kit,
        *,
        versions: tuple[str | None, str | None] = (None, None),
    ) -> Layout:
        """Return where services find their files and each other.

        `versions` are those of vLLM and LMCache in the engines' Python, as far as they are known.
        """
        from deploy.stack.process_layout import ProcessLayout

        if spec.image is not None:
            raise ConfigError(
                f"'{spec.image}' is for containers, and the stack would run as processes",
                setting="image",
                retry=({"--runtime": "compose"},),
                hint="set engine.python instead of an image",
            )
        files = home.stack(spec.name)
        return ProcessLayout(
            run_dir=files.run_dir,
            secrets_dir=files.secrets_dir,
            temp_dir=files.temp_dir,
            engine_program=self.engine_python,
            router_program=self.engine_python,
            redis_program=self.redis_server,
            kit=kit,
            hub_cache=spec.hub_cache,
            hub_token=spec.hf_token_file,
            prometheus_program=self.prometheus,
            grafana_program=self.grafana,
            versions=versions,
        )


@dataclass(frozen=True)
class Containers:
    """What containers are run with.

    Attributes:
        user: 'uid:gid' that they run as.
        hub_cache: folder of this machine that holds models of the hub.
        hub_token: whether the user has a token of the hub.
    """

    images: ContainerImages
    user: str
    hub_cache: str
    hub_token: bool = False

    @property
    def engine_image(self) -> str:
        """The engines' image as it was named."""
        return self.images.engine

    @property
    def has_code(self) -> bool:
        """Whether the engines' code is on this machine."""
        return bool(self.images.engine_id)

    @property
    def owner(self) -> tuple[int, int]:
        """The numbers of the user and the group that services run as."""
        uid, _, gid = self.user.partition(":")
        return int(uid), int(gid or uid)

    def needed_images(self, *, user_redis: bool) -> tuple[str, ...]:
        """Return the images that must be on this machine; of the engines', the content."""
        images = self.images
        redis = () if user_redis else (images.redis,)
        watching = filter(None, (images.prometheus, images.grafana))
        return (images.engine_id or images.engine, images.router, *redis, *watching)

    def hub_folder(self, spec: StackSpec) -> Path | None:  # noqa: ARG002
        """Return the folder for models of the hub; None for the default."""
        return Path(self.hub_cache) if self.hub_cache else None

    def require_visible(self, model: Model) -> None:
        """Refuse a model folder with links to files outside it, which no container has.

        Raises:
            ConfigError: it is such a folder, as those of the hub's cache are.
        """
        if model.source != "folder":
            return
        folder = Path(model.ref)
        for file in sorted(folder.iterdir()):
            if file.is_symlink() and not file.resolve().is_relative_to(folder):
                raise ConfigError(
                    f"{file} is a link out of its folder, and containers see only the folder",
                    setting="model",
                    retry=({"--model": "OWNER/NAME"},),
                    note="to use a model in the Hugging Face cache",
                )

    def layout(
        self,
        spec: SettledSpec,
        home: Home,
        model: Model,
        kit: Kit,
        *,
        versions: tuple[str | None, str | None] = (None, None),  # noqa: ARG002 - the image has its own
    ) -> Layout:
        """Return where services find their files and each other."""
        from deploy.stack.containers import ContainerLayout
        from deploy.stack.document import refuse_visible_secrets

        refuse_visible_secrets(spec)
        from_hub = model.source == "hub"
        return ContainerLayout(
            run_dir=home.stack(spec.name).run_dir,
            images=self.images,
            user=self.user,
            kit=kit,
            engine_cache=home.engine_cache(self.images.engine_id or self.images.engine),
            hub_cache=Path(self.hub_cache) if from_hub else None,
            hub_token=self.hub_token and from_hub,
            sees_all_gpus=spec.gpu_access == "all",
        )
