"""Report on the metrics page that the model's files are others than those that are served.

The engines that run go on with the weights that they loaded, and each one that ends stays down: it
would load KV of the old weights. An alert tells an operator before the last one has ended.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdkit_connector.identity.model_files import (
    DIGEST_VARIABLE,
    NAMED_VARIABLE,
    difference_to_plan,
    entries,
)
from pdkit_connector.log import get_logger

if TYPE_CHECKING:
    from starlette.types import Message, Send

METRIC = "pdkit_model_changed"
_EVERY_S = 60


class ModelWatch:
    """Compares the folder of this engine's model with the plan, and is a Prometheus collector."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        """Take vLLM's arguments; nothing is read yet."""
        self._argv, self._environ = argv, environ
        self._entries: object = None
        self.differs = ""

    def start(self) -> None:
        """Compare once a minute from now on, where the engine has files to compare."""
        if self._environ.get(DIGEST_VARIABLE) or self._environ.get(NAMED_VARIABLE):
            threading.Thread(target=self._watch, name="pdkit-model-watch", daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(_EVERY_S):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - nobody else would see it
                get_logger().exception("pdkit-connector ERROR the model's files")

    def look(self) -> None:
        """Compare the content, if the files' entries are not those of the last look."""
        found = entries(self._argv, self._environ)
        if found == self._entries:
            return
        before, self.differs = self.differs, difference_to_plan(self._argv, self._environ)
        self._entries = found
        if self.differs and not before:
            get_logger().warning(
                "pdkit-connector WARNING %s; this engine serves what it has loaded, and does not "
                "start again with these files; deploy status names the file and the next command",
                self.differs,
            )

    def describe(self) -> list[Any]:
        """Return nothing, so that nothing is collected before there is something."""
        return []

    def collect(self) -> Iterable[Any]:
        """Return one gauge, also where nothing is compared: a rule needs the zero."""
        from prometheus_client.core import GaugeMetricFamily

        text = "Whether the model's files differ from those that the stack serves."
        return [GaugeMetricFamily(METRIC, text, value=bool(self.differs))]


def unless_changed(send: Send) -> Send:
    """Return the lifespan's `send`, which reports a failed start if the files have changed.

    vLLM starts its HTTP server, and with it the lifespan, when the model is loaded.
    """

    async def checked(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete" and (
            differs := difference_to_plan(sys.argv[1:])
        ):
            message = {
                "type": "lifespan.startup.failed",
                "message": f"pdkit-connector ERROR {differs}, while this engine loaded the model, "
                "so it does not serve; deploy restart names the file and the next command",
            }
        await send(message)

    return checked
