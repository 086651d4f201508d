"""Decisions from the objects that were read: pure, so that every case is a table in a test."""
