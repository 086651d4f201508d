"""The API server: its client, reads of a service, and writes."""

from tandem.operator.cluster.client import KINDS, Cluster, ClusterError

__all__ = ["KINDS", "Cluster", "ClusterError"]
