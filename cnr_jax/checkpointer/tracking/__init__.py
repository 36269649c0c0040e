"""Tracking of changed rows since the parent: recorded, by fingerprints, and audited."""
