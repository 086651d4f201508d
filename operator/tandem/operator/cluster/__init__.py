"""The API server: its client, what is read of a service, and what is written back."""

from tandem.operator.cluster.client import KINDS, Cluster, ClusterError

__all__ = ["KINDS", "Cluster", "ClusterError"]
