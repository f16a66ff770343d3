"""Effects: processes, files, ports, HTTP and Redis. No layer below touches the machine."""
