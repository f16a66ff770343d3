"""From a spec to a plan: engines, devices, ports and memory. Pure: no hardware, no files."""
