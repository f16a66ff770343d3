"""What would stop `up` or lower the hit rate: rules about an observed machine. No I/O."""
