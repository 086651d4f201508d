"""What becomes of the sums of a (sequence, head) pair: left as a piece, merged, written."""
