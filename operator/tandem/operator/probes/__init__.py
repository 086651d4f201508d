"""HTTP requests to pods, outside the reconciliation, which must not wait for them."""
