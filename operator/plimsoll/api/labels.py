"""Names on objects: the one home of label, annotation, field-manager and API-group names."""

GROUP = "plimsoll.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"

# Labels on everything the operator makes for a service.
SERVICE = "plimsoll.dev/service"
ROLE = "plimsoll.dev/role"  # prefill | decode | serve
REVISION = "plimsoll.dev/revision"  # engines of one revision can exchange KV blocks
MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"

# Field managers of server-side apply: everything but replicas, and replicas alone.
MANAGER = "plimsoll"
SCALER = "plimsoll-scaler"
