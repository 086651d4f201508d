"""Answers to clients, whole and in streams, and their types for the document."""
