"""What people and scripts read: plain tables on stdout, one JSON envelope, progress on stderr."""
