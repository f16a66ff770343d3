"""The command line: options in, workflows called, one place that prints and exits."""
