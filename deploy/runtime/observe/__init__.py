"""What `deploy doctor` examines beside Docker. Each probe has a deadline and never raises."""

from deploy.runtime.observe.code import PROGRAM as CODE_PROGRAM
from deploy.runtime.observe.code import code_of_image, code_of_interpreter
from deploy.runtime.observe.gpus import see_gpus
from deploy.runtime.observe.host import clock_is_synced, place, see_host

__all__ = [
    "CODE_PROGRAM",
    "clock_is_synced",
    "code_of_image",
    "code_of_interpreter",
    "place",
    "see_gpus",
    "see_host",
]
