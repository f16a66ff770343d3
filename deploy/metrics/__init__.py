"""Services' counters, and what two readings of them show. No I/O."""
