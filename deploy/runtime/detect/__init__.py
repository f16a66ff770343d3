"""What the machine is: processors, memory, GPUs, and how Docker gives GPUs to containers.

Each probe reads text with a pure parser, and reports what it saw in a line for messages.
"""

from deploy.runtime.detect.machine import detect_host, detect_inventory, detected_vendor

__all__ = ["detect_host", "detect_inventory", "detected_vendor"]
