"""Names of labels, annotations, field managers and the API group."""

GROUP = "plimsoll.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"
ADMISSION_KIND = "InferenceServiceAdmission"
ADMISSION_PLURAL = "inferenceserviceadmissions"
CHECKPOINT_KIND = "InferenceServiceCheckpoint"
CHECKPOINT_PLURAL = "inferenceservicecheckpoints"

# The pool of a service's engines for gateways of other products (Gateway API Inference Extension).
POOL_GROUP = "inference.networking.k8s.io"
POOL_VERSION = "v1"
POOL_API_VERSION = f"{POOL_GROUP}/{POOL_VERSION}"
POOL_KIND = "InferencePool"
POOL_PLURAL = "inferencepools"
# The priority of a client's requests, as users of that extension have it.
OBJECTIVE_GROUP = "inference.networking.x-k8s.io"
OBJECTIVE_VERSION = "v1alpha2"
OBJECTIVE_KIND = "InferenceObjective"
OBJECTIVE_PLURAL = "inferenceobjectives"

# The workload of engines that have several pods each (LeaderWorkerSet). Its controller sets the labels on pods.
SET_GROUP = "leaderworkerset.x-k8s.io"
SET_VERSION = "v1"
SET_API_VERSION = f"{SET_GROUP}/{SET_VERSION}"
SET_KIND = "LeaderWorkerSet"
SET_PLURAL = "leaderworkersets"
SET_NAME = "leaderworkerset.sigs.k8s.io/name"
SET_REVISION = "leaderworkerset.sigs.k8s.io/template-revision-hash"
SET_EXCLUSIVE_TOPOLOGY = "leaderworkerset.sigs.k8s.io/exclusive-topology"  # annotation on the LeaderWorkerSet

# Labels on every object that the operator creates for a service.
SERVICE = "plimsoll.dev/service"
APPLIED = "plimsoll.dev/applied"  # annotation of applied objects: hash of what was applied
ROLE = "plimsoll.dev/role"  # prefill | decode | serve
WORKER_OF = "plimsoll.dev/worker-of"  # in place of ROLE, on pods of an engine that are not its leader
REVISION = "plimsoll.dev/revision"  # engines of one revision can exchange KV blocks
TEMPLATE = "plimsoll.dev/template"  # on pods of a LeaderWorkerSet: hash of the pod template that they have
# On ControllerRevisions and Deployments: the value of engine.rollout.generation that the pod template was rendered
# with. Absent for generation 0.
TEMPLATE_GENERATION = "plimsoll.dev/template-generation"
ROLLED_OUT = "plimsoll.dev/rolled-out"  # on ControllerRevisions that a rollout of the platform has made: "true"
TLS = "plimsoll.dev/tls"  # on pods of an engine that requires mutual TLS: "mutual"
MUTUAL_TLS = "mutual"
ENGINE = "plimsoll.dev/engine"  # on pods of an engine without launcher: the value of spec.engine.runtime
MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"

# Kubernetes' labels of an EndpointSlice: the Service that it belongs to, and who writes it.
SLICE_SERVICE = "kubernetes.io/service-name"
SLICE_MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
SLICE_CONTROLLER = "endpointslice-controller.k8s.io"

# Annotation on such pods, if the user named the metrics: port, path and names.
METRICS = "plimsoll.dev/metrics"

# Annotation on pods of engines whose arguments the operator has chosen: each argument with its reason.
TUNING = "plimsoll.dev/engine-tuning"
OWN_TUNING = "plimsoll.dev/engine-tuning-before"  # the same without the measured chunk, where there is one
# On ControllerRevisions and Deployments: the chunk of prompt tokens that was set by measurement. Absent for none.
MEASURED_CHUNK = "plimsoll.dev/measured-chunk"

# Label on a Secret that declares an API key of the gateway.
API_KEY = "plimsoll.dev/api-key"

# Field managers of server-side apply: the scaler owns only the replica counts.
FIELD_MANAGER = "plimsoll"
SCALER_FIELD_MANAGER = "plimsoll-scaler"

# Kind of the copy of a target's pod. It has the labels of a service's pod, and `ADOPTED`.
ADOPTED_POD_KIND = "AdoptedPod"
# A field of such a copy. Of the operator: port of the metrics, GPUs of a replica, and location of the model. Of a
# gateway: port of the API.
ADOPTED = "adopted"

SIZE_PROBLEM = "sizeProblem"  # a field that no stored object has: the API server prunes it
