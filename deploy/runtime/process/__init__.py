"""The process runtime: services as local processes, each in its own session."""
