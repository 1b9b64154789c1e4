"""Short tasks whose answer a program can verify, in graded difficulty."""
