"""Answers to clients, whole and streamed, and their types for the document."""
