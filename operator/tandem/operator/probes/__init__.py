"""What pods are asked over HTTP, beside the reconciliation, which must not wait for them."""
