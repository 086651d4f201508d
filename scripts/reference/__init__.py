"""Reference pages of docs/reference, made from the code that they describe."""
