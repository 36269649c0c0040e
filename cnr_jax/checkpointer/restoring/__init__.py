"""One restore: a step chosen, read, matched against the state asked for, and resumed from."""
