"""The same services as Kubernetes objects: a kustomize base, and one overlay a vendor."""
