"""The end of a threshold's search, among the candidates of one row."""
