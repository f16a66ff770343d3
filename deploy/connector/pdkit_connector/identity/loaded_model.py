"""Refuse to serve a model whose files were replaced while vLLM loaded them.

Loading takes minutes, and the comparison before it says nothing of files that a download replaces
meanwhile.
"""

from __future__ import annotations

import sys

from pdkit_connector.asgi import Message, Send
from pdkit_connector.identity.model_files import difference_to_plan


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
