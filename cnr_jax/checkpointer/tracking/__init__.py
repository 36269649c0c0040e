"""Which rows changed since the parent: recorded or found by fingerprints, and audited."""
