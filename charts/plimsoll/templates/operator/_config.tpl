{{- define "plimsoll.engine.image" -}}
{{ default (printf "plimsoll/engine-cuda:%s" .Chart.AppVersion) .Values.engine.image }}
{{- end }}

{{/* The engine image under another name in the same place. A digest is that image's alone: then the appVersion. */}}
{{- define "plimsoll.engine.simulatedImage" -}}
{{- $image := include "plimsoll.engine.image" . -}}
{{- $place := regexFind "^(.*/)?" $image -}}
{{- $tag := regexFind ":[^:/@]+$" (regexReplaceAll "@.*$" $image "") -}}
{{ $place }}engine-simulated{{ contains "@" $image | ternary "" $tag | default (printf ":%s" .Chart.AppVersion) }}
{{- end }}

{{/* The operator's settings file. Its keys are the operator's: plimsoll.controllers.operator_config reads them. */}}
{{- define "plimsoll.operator.config" -}}
watchNamespaces: {{ toJson .Values.watchNamespaces }}
engine:
  image: {{ include "plimsoll.engine.image" . }}
  simulatedImage: {{ default (include "plimsoll.engine.simulatedImage" .) .Values.engine.simulatedImage }}
  imagePullPolicy: {{ .Values.engine.imagePullPolicy }}
  imagePullSecrets: {{ toJson .Values.engine.imagePullSecrets }}
  gpuResource: {{ .Values.engine.gpuResource }}
  runtimeClassName: {{ .Values.engine.runtimeClassName | default nil | toJson }}
  runAsUser: {{ toJson .Values.engine.runAsUser }}
  defaults:
    {{- $traces := include "plimsoll.traces" . | fromYaml }}
    {{- $args := .Values.engine.defaults.args }}
    {{- $env := .Values.engine.defaults.env }}
    {{- if $traces.endpoint }}
    {{- $args = concat (list "--otlp-traces-endpoint" (printf "%s/v1/traces" $traces.endpoint)) $args }}
    {{- /* Engines trace what the gateway samples, and nothing else. */}}
    {{- $set := dict "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" "http/protobuf" "OTEL_SERVICE_NAME" "plimsoll-engine" "OTEL_TRACES_SAMPLER" "parentbased_always_off" }}
    {{- range .Values.engine.defaults.env }}{{ $set = omit $set .name }}{{ end }}
    {{- range $name, $value := $set }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end }}
    {{- end }}
    args: {{ toJson $args }}
    env: {{ toJson $env }}
    resources: {{ toJson .Values.engine.defaults.resources }}
  {{- with include "plimsoll.engineTlsSecret" . }}
  tls: {secretName: {{ . }}}
  {{- end }}
  {{- with .Values.engine.nodeCache }}
  {{- if .path }}
  nodeCache: {{ toJson (dict "path" .path "size" (default nil .size)) }}
  {{- end }}
  {{- end }}
  {{- with .Values.engine.rollout }}
  rollout: {{ toJson . }}
  {{- end }}
gateway:
  namespace: {{ .Release.Namespace }}
  service: {{ include "plimsoll.fullname" . }}-gateway
  scheme: {{ include "plimsoll.gateway.scheme" . }}
  port: {{ include "plimsoll.gateway.port" . }}
  podSelector:
    {{- include "plimsoll.selector" (dict "root" . "component" "gateway") | nindent 4 }}
  pickerPort: 8081
  shortModelNames: {namespaces: {{ toJson (default list (default dict .Values.gateway.shortModelNames).namespaces) }}}
metrics:
  from: {{ toJson .Values.metrics.from }}
networkPolicy:
  enabled: {{ .Values.networkPolicy.enabled }}
  {{- with include "plimsoll.egressValues" . | fromYaml }}
  {{- if .enabled }}
  {{- $rules := .engines }}
  {{- with $traces.endpoint }}
  {{- $rules = append $rules (dict "ports" (list (dict "port" (regexFind "[0-9]+$" . | int) "protocol" "TCP"))) }}
  {{- end }}
  egress: {{ dict "dns" .dns "modelHub" .modelHub "rules" $rules | toJson }}
  {{- end }}
  {{- end }}
{{- if include "plimsoll.internalTlsSecret" . }}
internalTls: {certificateDirectory: {{ include "plimsoll.internalTlsDirectory" . }}}
{{- end }}
{{- if (include "plimsoll.webhook" . | fromYaml).enabled }}
webhook: {port: 9443, certificateDirectory: /etc/plimsoll-webhook}
{{- end }}
{{- with include "plimsoll.gateway.endpointPicker" . | fromYaml }}
{{- if .inferencePools }}
inferencePools: {pickerService: {{ include "plimsoll.fullname" $ }}-endpoint-picker, pickerPort: 9002, from: {{ toJson .from }}}
{{- end }}
{{- end }}
{{- with include "plimsoll.operator.kedaScaler" . | fromYaml }}
{{- if .enabled }}
kedaScaler:
  port: 8082
  {{- if .tls.secretName }}
  certificateDirectory: /etc/plimsoll-keda
  requireClientCertificate: {{ .tls.requireClientCertificate }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
