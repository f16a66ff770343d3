"""The connector's own logger.

vLLM and LMCache configure only their own loggers, and both can be set above INFO; these lines are a
contract with whoever greps them, so they bring their own handler.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

NAME = "pdkit_connector"


@cache
def get_logger() -> logging.Logger:
    """Return the logger, writing INFO and above to stderr."""
    logger = logging.getLogger(NAME)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
