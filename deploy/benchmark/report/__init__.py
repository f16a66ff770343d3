"""A page, a table and pictures of benchmark runs."""
