"""The Compose runtime: services as containers of one project, seen through Docker's own API."""
