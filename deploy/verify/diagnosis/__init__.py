"""From what a check measured to causes, each with the next command to type."""

from deploy.verify.diagnosis.causes import CODES, diagnose
from deploy.verify.diagnosis.evidence import EngineFacts, Evidence, ServerFacts, StoreFacts

__all__ = ["CODES", "EngineFacts", "Evidence", "ServerFacts", "StoreFacts", "diagnose"]
