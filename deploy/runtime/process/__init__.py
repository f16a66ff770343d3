"""The process runtime: services as local processes, each in a session of its own."""
