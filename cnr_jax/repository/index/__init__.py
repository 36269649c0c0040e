"""Which steps a root holds, which may be parents of the next one, and which must stay."""
