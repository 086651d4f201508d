"""What clients are told: answers whole and in streams, and their types for the document."""
