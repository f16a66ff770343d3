"""Stands in for the connector, whose fixes need a real LMCache."""
