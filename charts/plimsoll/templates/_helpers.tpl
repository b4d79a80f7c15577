{{/* Names, labels and images: what more than one template says. */}}

{{- define "plimsoll.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Selector labels never change in the life of a release, and the engines' NetworkPolicies select the operator by name
     and component: so no override touches them. Call with (dict "root" $ "component" "operator"). */}}
{{- define "plimsoll.selector" -}}
app.kubernetes.io/name: plimsoll
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "plimsoll.labels" -}}
{{- with .root.Values.commonLabels }}
{{ toYaml (omit . "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") }}
{{- end }}
{{ include "plimsoll.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: plimsoll
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels of pods: no chart version, so that an upgrade rolls nothing that did not change. Also wants "extra". */}}
{{- define "plimsoll.podLabels" -}}
{{- with merge (dict) .extra .root.Values.commonLabels }}
{{ toYaml (omit . "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") }}
{{- end }}
{{ include "plimsoll.selector" . }}
{{- end }}

{{/* Call with (dict "image" .Values.image "default" .Chart.AppVersion). */}}
{{- define "plimsoll.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .default .image.tag }}
{{- end -}}
{{- end }}

{{/* Call with (dict "root" $ "component" "operator"). */}}
{{- define "plimsoll.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- if $account.name -}}
{{ $account.name }}
{{- else -}}
{{ $account.create | ternary (printf "%s-%s" (include "plimsoll.fullname" .root) .component) "default" }}
{{- end -}}
{{- end }}

{{/* Where the pods of a component may run, and who they are. Call with (dict "root" $ "component" "operator"). */}}
{{- define "plimsoll.podSettings" -}}
{{- $part := index .root.Values .component -}}
serviceAccountName: {{ include "plimsoll.serviceAccount" . }}
automountServiceAccountToken: {{ eq .component "operator" }}
{{- /* A Service named plimsoll-gateway would otherwise set PLIMSOLL_GATEWAY_PORT to an address. */}}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $part.affinity }}
affinity:
  {{- toYaml $part.affinity | nindent 2 }}
{{- else if gt (max (int $part.replicas) (int (dig "autoscaling" "maxReplicas" 0 $part))) 1 }}
affinity:
  podAntiAffinity:
    {{- if eq (default "preferred" $part.antiAffinity) "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        # Among the pods of one revision: a rollout needs no node of its own.
        matchLabelKeys: [pod-template-hash]
        labelSelector:
          matchLabels:
            {{- include "plimsoll.selector" . | nindent 12 }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "plimsoll.selector" . | nindent 14 }}
    {{- end }}
{{- end }}
{{- with $part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* A label selector of the namespaces that the operator manages and that "selector" selects; empty for all. */}}
{{- define "plimsoll.managedNamespaces" -}}
{{- $selector := deepCopy (.selector | default dict) -}}
{{- with .root.Values.watchNamespaces -}}
{{- $managed := dict "key" "kubernetes.io/metadata.name" "operator" "In" "values" . -}}
{{- $_ := set $selector "matchExpressions" (append ($selector.matchExpressions | default list) $managed) -}}
{{- end -}}
{{- with $selector }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/* The values of the admission webhook, as YAML: `helm upgrade --reuse-values` from an earlier chart has none or a part. */}}
{{- define "plimsoll.webhook" -}}
{{- $defaults := dict "enabled" false "timeoutSeconds" 3 "namespaceSelector" dict "annotations" dict "certificate" (dict "secretName" "" "caBundle" "") -}}
{{ toYaml (merge (deepCopy (.Values.webhook | default dict)) $defaults) }}
{{- end }}

{{/* The values of targets, as YAML: `helm upgrade --reuse-values` from an earlier chart has none. */}}
{{- define "plimsoll.targets" -}}
{{ default (dict "resources" (list (dict "apiGroup" "apps" "resources" (list "statefulsets")))) .Values.targets | toYaml }}
{{- end }}

{{/* The values of what the operator offers to other autoscalers, as YAML: `helm upgrade --reuse-values` from an earlier
     chart has none. */}}
{{- define "plimsoll.operator.recommendations" -}}
{{ merge (dict) (default dict .Values.operator.recommendations) (dict "enabled" false "from" list) | toYaml }}
{{- end }}

{{- define "plimsoll.gateway.endpointPicker" -}}
{{- $values := merge (dict) (deepCopy (default dict .Values.gateway.endpointPicker)) (dict "enabled" false "inferencePools" false "inferenceObjectives" false "from" list "tls" (dict "secretName" "")) -}}
{{- if $values.inferencePools -}}
{{- if not $values.enabled -}}
{{- fail "gateway.endpointPicker.inferencePools needs gateway.endpointPicker.enabled" -}}
{{- end -}}
{{- if and .Values.watchNamespaces (not (has .Release.Namespace .Values.watchNamespaces)) -}}
{{- fail (printf "gateway.endpointPicker.inferencePools needs the release's namespace %s in watchNamespaces, because a pool and its picker share a namespace" .Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- if and $values.inferenceObjectives (not $values.enabled) -}}
{{- fail "gateway.endpointPicker.inferenceObjectives needs gateway.endpointPicker.enabled" -}}
{{- end -}}
{{ $values | toYaml }}
{{- end }}

{{- define "plimsoll.operator.kedaScaler" -}}
{{- $tls := dict "secretName" "" "requireClientCertificate" false -}}
{{- $values := merge (dict) (deepCopy (default dict .Values.operator.kedaScaler)) (dict "enabled" false "from" list "tls" $tls) -}}
{{- if and $values.tls.requireClientCertificate (not $values.tls.secretName) -}}
{{- fail "operator.kedaScaler.tls.requireClientCertificate needs operator.kedaScaler.tls.secretName" -}}
{{- end -}}
{{ toYaml $values }}
{{- end }}

{{/* The values of egress, as YAML: `helm upgrade --reuse-values` from an earlier chart has none or a part. */}}
{{- define "plimsoll.egressValues" -}}
{{- $values := dict "enabled" false "dns" list "apiServer" list "apiServerPorts" (list 443 6443) "modelHub" true "engines" list "gateway" list "operator" list -}}
{{- range $key, $value := .Values.networkPolicy.egress -}}
{{- $_ := set $values $key $value -}}
{{- end -}}
{{ toYaml $values }}
{{- end }}

{{/* The Secret with the certificate of the admission webhook. */}}
{{- define "plimsoll.webhook.secret" -}}
{{ default (printf "%s-webhook" (include "plimsoll.fullname" .)) (include "plimsoll.webhook" . | fromYaml).certificate.secretName }}
{{- end }}

{{/* Whether requests need an API key: `helm upgrade --reuse-values` from an earlier chart has no such value. */}}
{{- define "plimsoll.gateway.apiKeys" -}}
{{ default "Disabled" (default dict .Values.gateway.authentication).apiKeys }}
{{- end }}

{{/* The issuers of tokens, as JSON: `helm upgrade --reuse-values` from an earlier chart has none. */}}
{{- define "plimsoll.gateway.jwtIssuers" -}}
{{ default list (default dict (default dict .Values.gateway.authentication).jwt).issuers | toJson }}
{{- end }}

{{/* Which clients may use the gateway: `anyone`, `optional` (a credential counts) or `authenticated` ones alone. */}}
{{- define "plimsoll.gateway.admits" -}}
{{- $keys := include "plimsoll.gateway.apiKeys" . -}}
{{- if eq $keys "Optional" -}}optional
{{- else if or (eq $keys "Required") (ne (include "plimsoll.gateway.jwtIssuers" .) "[]") -}}authenticated
{{- else -}}anyone
{{- end -}}
{{- end }}

{{/* The values of TLS, as YAML: `helm upgrade --reuse-values` from an earlier chart has none. */}}
{{- define "plimsoll.gateway.tls" -}}
{{ merge (dict) (default dict .Values.gateway.tls) (dict "secretName" "" "minVersion" "TLSv1.2" "plaintext" "Refuse") | toYaml }}
{{- end }}

{{/* The Secret of operator and gateways for TLS in the cluster: `helm upgrade --reuse-values` from an earlier chart has none. */}}
{{- define "plimsoll.internalTlsSecret" -}}
{{ (default dict .Values.internalTls).secretName }}
{{- end }}

{{/* Where operator and picker find it. */}}
{{- define "plimsoll.internalTlsDirectory" -}}
/etc/plimsoll-internal-tls
{{- end }}

{{/* The Secret of the engines in each namespace. */}}
{{- define "plimsoll.engineTlsSecret" -}}
{{- $secret := (default dict .Values.engine.tls).secretName -}}
{{- if and $secret (not (include "plimsoll.internalTlsSecret" .)) -}}
{{- fail "engine.tls.secretName needs internalTls.secretName, by which engines know gateways and operator" -}}
{{- end -}}
{{- if and $secret (include "plimsoll.gateway.endpointPicker" . | fromYaml).enabled -}}
{{- fail "engine.tls.secretName excludes gateway.endpointPicker.enabled, because gateways of other products have no certificate" -}}
{{- end -}}
{{ $secret }}
{{- end }}

{{/* What clients speak: also the name of the port. */}}
{{- define "plimsoll.gateway.scheme" -}}
{{ ternary "https" "http" (ne (include "plimsoll.gateway.tls" . | fromYaml).secretName "") }}
{{- end }}

{{- define "plimsoll.gateway.port" -}}
{{ default (ternary 443 80 (eq (include "plimsoll.gateway.scheme" .) "https")) .Values.gateway.service.port }}
{{- end }}

{{/* The Secret that all gateways share: `helm upgrade --reuse-values` from an earlier chart has no value for it. */}}
{{- define "plimsoll.gateway.peerSecret" -}}
{{ (default dict .Values.gateway.peers).secretName | default (printf "%s-gateway-peers" (include "plimsoll.fullname" .)) }}
{{- end }}

{{/* The pod's own name and namespace as environment variables. */}}
{{- define "plimsoll.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{/* The values of traces, and their defaults where an older chart's values have none. */}}
{{- define "plimsoll.traces" -}}
{{- $traces := default dict (default dict .Values.telemetry).traces }}
{{- $rate := 0.01 }}
{{- if not (kindIs "invalid" $traces.samplingRate) }}{{ $rate = $traces.samplingRate }}{{ end }}
{{- dict "endpoint" (default "" $traces.endpoint) "samplingRate" $rate | toJson }}
{{- end }}
