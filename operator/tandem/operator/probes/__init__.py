"""HTTP requests to pods, outside the reconciliation."""
