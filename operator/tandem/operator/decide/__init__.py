"""What follows from what was read: pure, so that every case is a table in a test."""
