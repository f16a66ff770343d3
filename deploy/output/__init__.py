"""Output for people and scripts: plain tables on stdout, one JSON envelope, progress on stderr."""
