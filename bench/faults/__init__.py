"""Faults under load: what clients lose, and when a stack serves with all it has again."""
