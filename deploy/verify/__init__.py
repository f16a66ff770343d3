"""The judgement behind `check`: what must hit, whether answers are equal, and why not. Pure."""
