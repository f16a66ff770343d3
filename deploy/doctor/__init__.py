"""What would stop `up` or spoil the hit rate: rules on what was seen of a machine. No I/O."""
