"""From a plan to a stack: the services every runtime runs, and the document that shows them."""
