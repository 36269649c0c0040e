"""A run in pictures: what its saves were, drawn as one page of HTML or one SVG."""
