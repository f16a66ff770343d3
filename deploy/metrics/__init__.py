"""What services count about themselves, and what two readings of it tell. No I/O."""
