"""Selection of touched rows, which are gathered into chunks and encoded."""
