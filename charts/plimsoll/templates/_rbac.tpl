{{/* What operator and gateway may do, and where: each verb here is one that the code uses. Only the gateway reads Secrets,
     those of the release's namespace, if requests may have API keys. Nobody reaches into a pod by the API server: engines
     and gateways are asked at their own ports. */}}

{{- define "plimsoll.operator.rules" -}}
- apiGroups: [plimsoll.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [plimsoll.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
- apiGroups: [plimsoll.dev]
  resources: [inferenceserviceadmissions]
  verbs: [get, list, watch, create, patch, delete]
# Read once, at the start.
- apiGroups: [plimsoll.dev]
  resources: [inferenceservicecheckpoints]
  verbs: [list, create, patch]
# Asked for by clusters that check who may block the deletion of an owner (OpenShift does).
- apiGroups: [plimsoll.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [get, patch]
# Targets of services, and their other autoscalers.
{{- range (include "plimsoll.targets" . | fromYaml).resources }}
- apiGroups: [{{ .apiGroup }}]
  resources: {{ toJson .resources }}
  verbs: [get]
- apiGroups: [{{ .apiGroup }}]
  resources: [{{ range $number, $name := .resources }}{{ if $number }}, {{ end }}{{ $name }}/scale{{ end }}]
  verbs: [get, patch]
{{- end }}
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
# Tiers with several nodes per engine. The kind may be absent.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets/scale]
  verbs: [patch]
# Written once and never changed.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [list, watch, create, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Patched where a tier shrinks: the annotation that says which pods go first.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# Listed for a pod that waits for a volume: nothing else says why.
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
# The lease that shows other releases who manages the services of a namespace.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [plimsoll-release]
  verbs: [get, update, delete]
{{- if not .Values.watchNamespaces }}
# The definition may come, or become known, after the operator.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* In the release's own namespace: the lease of the election, the list of namespaces with services, and the gateway's
     pods. */}}
{{- define "plimsoll.operator.ownRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [plimsoll-operator]
  verbs: [get, update]
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [plimsoll-service-namespaces]
  verbs: [get, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- if (include "plimsoll.gateway.endpointPicker" . | fromYaml).inferencePools }}
# Kubernetes deletes a pool with its service.
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch]
{{- end }}
{{- end }}

{{- define "plimsoll.gateway.rules" -}}
- apiGroups: [plimsoll.dev]
  resources: [inferenceservices, inferenceserviceadmissions]
  verbs: [list, watch]
# Addresses and readiness of engines. What else a gateway must know of them is in the InferenceServiceAdmission.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end }}

{{/* In the release's own namespace: the other gateway pods, one of which must be ready before a pod stops, and the Secrets
     that declare API keys. RBAC cannot tell these from other Secrets by their label. */}}
{{- define "plimsoll.gateway.ownRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- if (include "plimsoll.gateway.endpointPicker" . | fromYaml).inferenceObjectives }}
- apiGroups: [inference.networking.x-k8s.io]
  resources: [inferenceobjectives]
  verbs: [list, watch]
{{- end }}
{{- if ne (include "plimsoll.gateway.apiKeys" .) "Disabled" }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* A Role (with "namespace") or a ClusterRole (without), and its binding to the component's service account.
     Call with (dict "root" $ "component" "operator" "name" NAME "rules" TEXT "namespace" NAMESPACE). */}}
{{- define "plimsoll.grant" -}}
{{- $cluster := not .namespace -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $cluster | ternary "ClusterRole" "Role" }}
metadata:
  name: {{ .name }}
  {{- if not $cluster }}
  namespace: {{ .namespace }}
  {{- end }}
  labels:
    {{- include "plimsoll.labels" . | trim | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $cluster | ternary "ClusterRoleBinding" "RoleBinding" }}
metadata:
  name: {{ .name }}
  {{- if not $cluster }}
  namespace: {{ .namespace }}
  {{- end }}
  labels:
    {{- include "plimsoll.labels" . | trim | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $cluster | ternary "ClusterRole" "Role" }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "plimsoll.serviceAccount" . }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}

{{/* The grant of a component's rules wherever InferenceServices are served. */}}
{{- define "plimsoll.grants" -}}
{{- $name := printf "%s-%s" (include "plimsoll.fullname" .root) .component -}}
{{- $grant := merge (dict "name" $name) . -}}
{{- range .root.Values.watchNamespaces }}
---
{{ include "plimsoll.grant" (merge (dict "namespace" .) $grant) }}
{{- else }}
---
{{ include "plimsoll.grant" (merge (dict "namespace" "") $grant) }}
{{- end }}
{{- end }}
