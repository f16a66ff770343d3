"""Says for which GPUs it is built, as far as anybody asks. Importing the real one takes seconds."""

from types import SimpleNamespace

version = SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(get_arch_list=lambda: ["sm_80", "sm_90", "compute_90"])
_C = SimpleNamespace()
